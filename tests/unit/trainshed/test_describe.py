"""Facts that `plan` and `describe` print."""

from service.api.schemas.plan import Float8Out
from trainshed.cli.output.describe import float8_facts


def test_layers_in_float8_are_counted_and_those_of_a_wrong_size_are_named() -> None:
    planned = Float8Out(scaling="rowwise", linears=14, left_out=["model.layers.0.mlp.up_proj"]).model_dump()
    assert float8_facts(planned) == {"float8": "14 linear layers, rowwise; not model.layers.0.mlp.up_proj"}
    built = {"scaling": "tensorwise", "linears": 14, "left_out": [], "emulated": True}
    assert float8_facts(built) == {"float8": "14 linear layers, tensorwise, emulated"}
    assert float8_facts(None) == {}
