"""The JSON text of a spec, as answers and the database hold it."""

from service.recent import OfSame
from train_loop.spec import AnyJobSpec


def _dump(spec: AnyJobSpec) -> str:
    return spec.model_dump_json()


spec_json = OfSame[AnyJobSpec, str](512, _dump)
"""Return the JSON text of a spec. Computed once for each of the specs that were used last: a spec never changes."""
