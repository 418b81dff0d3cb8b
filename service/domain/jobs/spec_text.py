"""The JSON text of a spec, as answers and the database hold it."""

from service.recent import Recent
from train_loop.spec import AnyJobSpec

_LARGEST = 1 << 15
"""Maximum characters of a text that is kept: large specs must not fill the memory."""
_known = Recent[int, tuple[AnyJobSpec, str]](512)
"""Texts of the specs that were used last, by the identity of the spec, which an entry holds."""


def spec_json(spec: AnyJobSpec) -> str:
    """Return the JSON text of a spec. That of a small one is computed once for the same object: specs never change."""
    found = _known.get(id(spec))
    if found is None:
        found = spec, spec.model_dump_json()
        if len(found[1]) <= _LARGEST:
            _known.put(id(spec), found)
    return found[1]
