"""Any change of a public configuration imports with every field reported, or is an error."""

import random
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.train_loop.spec.importers.cases import beside, documents, imported, job, unreported
from tests.unit.train_loop.spec.importers.tools import axolotl, llama_factory, torchtune
from train_loop.spec import SpecError
from train_loop.spec.importers.draft import leaves, steps_of
from train_loop.spec.importers.references import compose, resolve

FILES = [yaml.safe_load(text) for name in ("roll.yaml", "accelerate.yaml") for text in documents(name).values()]
FILES += [resolve(tool.draw(random.Random(seed))) for tool in (axolotl, llama_factory, torchtune) for seed in range(8)]
SCALARS = st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(-1, 2) | st.text("ab1.$ {}", max_size=8)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text("ab.", max_size=3), SCALARS, max_size=2)


def changed(raw: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a copy with the value at a dotted path."""
    first, *rest = steps_of(field)
    below = raw.get(first)
    if not rest or not isinstance(below, dict):
        return {**raw, first: value}
    return {**raw, first: changed(below, ".".join(rest), value)}


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_value_of_a_field_imports_with_every_field_reported_or_is_an_error(data: st.DataObject) -> None:
    raw = data.draw(st.sampled_from(FILES))
    for field, _ in data.draw(st.lists(st.sampled_from([*leaves(raw)]), min_size=1, max_size=3)):
        above = field.rpartition(".")[0]
        raw = changed(raw, data.draw(st.sampled_from([field, above or field])), data.draw(VALUES))
    try:
        found = imported(yaml.safe_dump(raw))
    except SpecError:
        return
    job(found)
    assert unreported(found, resolve(compose(raw, beside))) == set()
