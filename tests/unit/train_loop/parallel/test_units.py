"""FSDP units by size: torch's rule, and one unit for each parameter."""

from itertools import chain
from typing import Any

import pytest
from torch import nn

from tests.support.builders.specs import TINY, may_read, raw_spec
from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.parallel.unit_sizes import unit_sizes
from train_loop.parallel.units import check_shared, find_units, repeated_layers
from train_loop.plan import read_shape
from train_loop.preflight.model import check_model
from train_loop.spec import SpecError, StrategySpec, WrapPolicySpec, parse

IDS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48} | IDS
TIED = TINY | {"tie_word_embeddings": True}
EMBEDDINGS, HEAD = ["model.embed_tokens"], ["lm_head"]
WTE = ["transformer.wte", "lm_head"]
LAYERS = [["model.layers.1"], ["model.layers.0"]]


def of(config: dict[str, Any]) -> Anatomy:
    return CAUSAL.anatomy(build_model(parse(raw_spec(model={"config": config})).model))


class Block(nn.Module):
    """A block whose linear module may be that of another."""

    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.linear = shared


def test_a_module_of_two_units_is_refused_and_units_may_be_nested() -> None:
    shared = nn.Linear(2, 2)
    inner, outer = Block(nn.Linear(2, 2)), nn.Sequential()
    outer.append(inner)
    model = nn.Sequential(Block(shared), Block(shared), outer)
    with pytest.raises(ModelError, match=r"0\.linear\.weight and 1\.linear\.weight of Sequential are one parameter"):
        check_shared(model, [[model[0]], [model[1]]])
    check_shared(model, [[inner], [outer]])


def chosen(config: dict[str, Any], **policy: Any) -> list[list[str]]:
    anatomy = of(config)
    names = {module: name for name, module in anatomy.model.named_modules()}
    return [[names[one] for one in unit] for unit in find_units(anatomy, WrapPolicySpec(**policy))]


@pytest.mark.parametrize(
    ("config", "policy", "units"),
    [
        (TINY, {}, [EMBEDDINGS, HEAD, *LAYERS]),
        (TINY, {"wrap_embeddings": False}, [HEAD, *LAYERS]),
        (TINY, {"wrap_lm_output": False}, [EMBEDDINGS, *LAYERS]),
        # A table has 7,744 parameters, and a layer 7,760.
        (TINY | {"vocab_size": 242}, {}, LAYERS),
        (TINY | {"vocab_size": 243}, {}, [EMBEDDINGS, HEAD, *LAYERS]),
        (TINY | {"vocab_size": 242}, {"wrap_embeddings": True}, [EMBEDDINGS, *LAYERS]),
        (TIED, {}, LAYERS),
        (TIED, {"wrap_embeddings": True}, [[*EMBEDDINGS, *HEAD], *LAYERS]),
    ],
)
def test_large_embeddings_and_heads_are_units_unless_they_are_tied(
    config: dict[str, Any], policy: dict[str, Any], units: list[list[str]]
) -> None:
    assert chosen(config, **policy) == units
    # The plan without the model has the same sizes.
    strategy = StrategySpec(wrap_policy=WrapPolicySpec(**policy))
    shape, counted = read_shape(config), unit_sizes(of(config), strategy)
    assert counted is None or shape.units(strategy) == counted or shape.tied


def by_size(anatomy: Anatomy, least: int) -> list[list[str]]:
    names = {module: name for name, module in anatomy.model.named_modules()}
    return [[names[one] for one in unit] for unit in find_units(anatomy, WrapPolicySpec(min_num_params=least))]


def halves(parts: str) -> list[list[str]]:
    return [[f"transformer.h.{layer}.{part}"] for layer in (1, 0) for part in parts.split()]


@pytest.mark.parametrize(
    ("config", "least", "units"),
    [
        (TINY, 7760, [EMBEDDINGS, HEAD, *LAYERS]),
        (TINY, 4000, [EMBEDDINGS, HEAD, ["model.layers.1.mlp"], ["model.layers.0.mlp"], ["model"]]),
        (TINY, 7761, [EMBEDDINGS, HEAD, ["model"]]),
        (TINY, 12289, [["model"]]),
        (TIED, 7760, [[*EMBEDDINGS, *HEAD], *LAYERS]),
        (TIED, 12288, [[*EMBEDDINGS, *HEAD]]),
        (GPT2, 9000, [WTE, ["transformer.h.1"], ["transformer.h.0"]]),
        (GPT2, 4000, [WTE, *halves("mlp.c_proj mlp.c_fc attn")]),
    ],
)
def test_units_have_the_size_that_is_asked_for(config: dict[str, Any], least: int, units: list[list[str]]) -> None:
    assert by_size(of(config), least) == units


@pytest.mark.parametrize("config", [TINY, TIED, GPT2])
@pytest.mark.parametrize("least", [1, 100, 1000, 2000, 5000])
def test_each_parameter_is_in_one_unit_of_at_least_that_size(config: dict[str, Any], least: int) -> None:
    anatomy, taken = of(config), set[int]()
    for unit in find_units(anatomy, WrapPolicySpec(min_num_params=least)):
        own = {id(p): p.numel() for one in unit for p in one.parameters() if id(p) not in taken}
        assert sum(own.values()) >= least
        elsewhere = [m for m in anatomy.model.modules() if m not in set(chain(*(one.modules() for one in unit)))]
        assert own.keys().isdisjoint(id(p) for m in elsewhere for p in m.parameters(recurse=False))
        taken |= own.keys()


def test_models_that_name_no_layers_have_those_of_the_size() -> None:
    listed = nn.ModuleList([nn.Linear(4, 4)])
    model = nn.Sequential(listed, nn.Linear(4, 8), nn.MultiheadAttention(4, 2), nn.Linear(1, 1))
    anatomy = Anatomy(model, CAUSAL, (), None, None, (), depth=0, attention_width=0)
    policy = WrapPolicySpec(min_num_params=20)
    assert [names[0] for names in by_size(anatomy, 20)] == ["2", "1", "0.0"]
    assert repeated_layers(anatomy, policy) == [listed[0], model[1], model[2]]


def test_size_beyond_every_module_is_refused_with_the_largest() -> None:
    strategy = {"wrap_policy": {"min_num_params": 10**9}}
    _, (problem,) = check_model(parse(raw_spec(strategy=strategy)), may_read())
    assert problem.pointer == "/strategy/wrap_policy/min_num_params"
    assert problem.message.endswith("of Qwen3ForCausalLM that could be a unit; choose at most 27840")


@pytest.mark.parametrize(
    ("strategy", "pointer", "message"),
    [
        (
            {"wrap_policy": {"min_num_params": 9, "transformer_layer_cls_to_wrap": ["A", "B"]}},
            "/strategy/wrap_policy",
            "min_num_params=9 selects units by size and transformer_layer_cls_to_wrap=A, B by class; remove one",
        ),
        (
            {"wrap_policy": {"min_num_params": 9}, "apply_tiled_mlp": True},
            "/strategy",
            "apply_tiled_mlp gathers each MLP once for all tiles, but min_num_params=9 may make units of its parts; "
            "remove one",
        ),
        ({"wrap_policy": {"min_num_params": 0}}, "/strategy/wrap_policy/min_num_params", "greater than or equal to 1"),
    ],
)
def test_size_is_refused_beside_what_it_contradicts(strategy: dict[str, Any], pointer: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw_spec(strategy=strategy))
    ((found, text),) = [(problem.pointer, problem.message) for problem in caught.value.problems]
    assert found == pointer
    assert message in text
