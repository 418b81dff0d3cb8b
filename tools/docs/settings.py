"""The reference of the service's settings, from the model that reads them."""

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from service.config.settings import Settings
from service.domain.access.rate_limit import Rate
from service.domain.queue.policy import Quota
from tools.docs.markdown import code, sentence, table
from tools.docs.types import rules, type_name

_TYPES = {Rate: "rate", Quota: "quota", SecretStr: "text"}
# Their defaults depend on the machine.
_COMPUTED = {"ray_cpus": "the number of CPUs, at least 2"}


def page() -> str:
    """Return the Markdown of the page."""
    rows = [
        (code(f"TRAINSHED_{name.upper()}"), type_name(field.annotation, _TYPES), _default(name, field), _meaning(field))
        for name, field in Settings.model_fields.items()
    ]
    return (
        "# Settings\n\nEnvironment variables of the service. Invalid or unknown `TRAINSHED_*` variables are reported "
        "at startup with a suggestion.\n\n" + table(("variable", "type", "default", "meaning"), rows)
    )


def _default(name: str, field: FieldInfo) -> str:
    if name in _COMPUTED:
        return _COMPUTED[name]
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, bool):
        return code(str(value).lower())
    return code(",".join(map(str, value)) if isinstance(value, tuple) else str(value).removesuffix(".0"))


def _meaning(field: FieldInfo) -> str:
    return " ".join(filter(None, (sentence(field.description or ""), sentence(", ".join(rules(field))))))
