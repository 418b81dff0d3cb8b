"""Freezing by module name prefix."""

import pytest

from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from train_loop.errors import ModelError
from train_loop.model.families.causal.build import build_model
from train_loop.model.freeze import freeze
from train_loop.preflight.model import check_model
from train_loop.spec import parse


def trained(*prefixes: str, tied: bool = False, layers: int = 2) -> set[str]:
    """Return the parameters that still train."""
    config = TINY | {"tie_word_embeddings": tied, "num_hidden_layers": layers}
    model = build_model(spec(model={"config": config}).model)
    freeze(model, prefixes)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_prefix_ends_at_a_dot() -> None:
    left = trained("model.layers.1", layers=11)
    assert not any(name.startswith("model.layers.1.") for name in left)
    assert any(name.startswith("model.layers.10.") for name in left)


def test_full_parameter_name_is_accepted() -> None:
    assert trained() - trained("model.norm.weight", "lm_head") == {"model.norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("prefix", ["lm_head", "model.embed_tokens"])
def test_tied_embeddings_are_frozen_by_either_name(prefix: str) -> None:
    assert trained(tied=True) - trained(prefix, tied=True) == {"model.embed_tokens.weight"}


def test_unmatched_prefix_is_rejected_with_valid_ones() -> None:
    with pytest.raises(ModelError) as caught:
        trained("model.layer.0")
    assert str(caught.value) == (
        "freeze_module_prefix model.layer.0 matches no parameter; choose for example model.layers.0, "
        "model.layers.1, model.layers, model, model.embed_tokens, model.norm, lm_head"
    )


def test_freezing_all_parameters_is_rejected() -> None:
    with pytest.raises(ModelError, match="freeze_module_prefix model, lm_head leaves no parameter to train"):
        trained("model", "lm_head")


def test_invalid_prefix_is_rejected_before_the_run() -> None:
    _, (problem,) = check_model(parse(raw_spec(model={"freeze_module_prefix": ["model.emb"]})), may_read())
    assert problem.pointer == "/model/freeze_module_prefix"
    assert (
        "model.emb matches no parameter; choose for example model.norm, model, model.layers, model.embed"
        in problem.message
    )
