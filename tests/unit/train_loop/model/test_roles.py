"""Roles of parameters, against the published rules and against what models do with each parameter."""

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from tests.families.parity import fill
from tests.support.builders.searches import drawn
from tests.support.families import encoders
from tests.support.families.families import FAMILIES, small
from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.masked import MASKED
from train_loop.model.families.own import OwnModels
from train_loop.model.lora.adapters import inject_adapters
from train_loop.model.roles import Role, roles_of
from train_loop.spec import LoraSpec, ModelSpec

STATE_SPACES = ("bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "qwen3_next", "zamba")
ALWAYS = ("cpmant", "gpt2", "gpt_oss", "jamba", "mamba", "qwen3_moe", "rwkv", "xlnet", "zamba")
"""Families with parameters of each role, of which several are raw ones."""
OTHERS = [name for name in FAMILIES if name not in ALWAYS]


@cache
def roles(family: str) -> dict[str, Role] | None:
    """Return the roles of a family's small model, by name; None if the family is refused."""
    try:
        return named(CAUSAL.build(ModelSpec(config=small(family))))
    except ModelError:
        return None


def named(anatomy: Anatomy) -> dict[str, Role]:
    found = roles_of(anatomy)
    return {name: found[id(p)] for name, p in anatomy.model.named_parameters()}


def leaves(family: str, role: Role) -> set[str]:
    """Return the names of the parameters of a role, without layers."""
    found = roles(family)
    assert found is not None
    return {
        name.split(".", 3)[-1] if ".layers." in f".{name}" or "blocks" in name else name
        for name, its in found.items()
        if its == role
    }


def test_roles_of_mamba_are_those_of_its_publication() -> None:
    """Mamba keeps A_log and D from decay, and biases; its convolution decays."""
    mixer = ("in_proj", "x_proj", "dt_proj", "out_proj")
    assert leaves("mamba", Role.MATRIX) == {f"mixer.{name}.weight" for name in mixer}
    assert leaves("mamba", Role.WEIGHT) == {"mixer.conv1d.weight"}
    assert leaves("mamba", Role.TABLE) == {"backbone.embeddings.weight"}
    of_states = {"mixer.A_log", "mixer.D", "mixer.conv1d.bias", "mixer.dt_proj.bias"}
    assert leaves("mamba", Role.VECTOR) == {*of_states, "norm.weight", "backbone.norm_f.weight"}


def test_roles_of_rwkv_are_those_of_its_publication() -> None:
    """RWKV lets weights decay that have several dimensions without those of size 1: no mixing vectors."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small("rwkv")))
    decayed = {name for name, p in model.named_parameters() if len(p.squeeze().shape) >= 2 and ".weight" in name}
    found = roles("rwkv")
    assert found is not None
    assert {name for name, role in found.items() if role != Role.VECTOR} == decayed
    tables = {"rwkv.embeddings.weight", "head.weight"}
    assert {name for name, role in found.items() if role == Role.MATRIX} == decayed - tables


@pytest.mark.parametrize("family", STATE_SPACES)
def test_parameters_of_state_spaces_are_vectors(family: str) -> None:
    found = roles(family)
    assert found is not None
    of_states = {name: role for name, role in found.items() if name.rpartition(".")[2] in ("A_log", "D", "dt_bias")}
    assert of_states
    assert set(of_states.values()) == {Role.VECTOR}


@pytest.mark.parametrize("family", [*ALWAYS, *drawn(OTHERS, 8)])
def test_roles_of_a_family_decay_as_in_trainer_but_for_vectors(family: str) -> None:
    """Trainer keeps names with bias or norm from decay; published rules keep vectors and rates of state spaces."""
    if (found := roles(family)) is None:
        pytest.skip("refused")
    check_decay(CAUSAL.build(ModelSpec(config=small(family))).model, found)


@pytest.mark.parametrize("family", drawn(sorted(encoders.FAMILIES | encoders.OTHERS), 4))
def test_roles_of_an_encoder_decay_as_in_trainer_but_for_vectors(family: str) -> None:
    config = {"model_type": family} | (encoders.FAMILIES | encoders.OTHERS)[family]
    try:
        anatomy = MASKED.build(ModelSpec.model_validate({"config": config, "head": {"masked_lm": {}}}))
    except ModelError:
        pytest.skip("refused")
    check_decay(anatomy.model, named(anatomy))


def check_decay(model: nn.Module, found: dict[str, Role]) -> None:
    """Check the roles of a model against transformers' own rule for names, and published rules for vectors."""
    by_trainer = set(Trainer.get_decay_parameter_names(cast("Trainer", None), cast("Any", model)))
    for name, p in model.named_parameters():
        holder, _, leaf = name.rpartition(".")
        is_matrix = p.ndim > 1 and (
            p.squeeze().ndim > 1 or isinstance(model.get_submodule(holder), nn.Linear | nn.Embedding)
        )
        # Names of layers contain norm, in roberta-prelayernorm.
        decays = is_matrix and (name in by_trainer or leaf == "weight") and leaf not in ("A_log", "D")
        assert (found[name] != Role.VECTOR) == decays, name


MULTIPLIER = {"linear": 1, "addmm": 2}
"""Argument of functions of linear layers that is their matrix."""


def test_matrices_of_adapters_are_matrices_and_magnitudes_vectors() -> None:
    spec = ModelSpec(config=small("gpt2"), lora=LoraSpec(use_dora=True, target_modules=("c_attn",)))
    anatomy = CAUSAL.build(spec)
    inject_adapters(anatomy, spec)
    found = {name: role for name, role in named(anatomy).items() if "lora_" in name}
    assert {name.split(".")[5]: role for name, role in found.items()} == {
        "lora_A": Role.MATRIX,
        "lora_B": Role.MATRIX,
        "lora_magnitude_vector": Role.VECTOR,
    }


def test_tied_embeddings_are_a_table() -> None:
    found = named(CAUSAL.build(ModelSpec(config=small("qwen3") | {"tie_word_embeddings": True})))
    assert found["model.embed_tokens.weight"] == Role.TABLE


class OwnMixer(nn.Module):
    """A state space, a mixture and a vision transformer's tokens of own code, most of them raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.gate = nn.Linear(4, 4), nn.Linear(4, 1)
        self.conv, self.rows, self.norm = nn.Conv1d(4, 4, 1, groups=4), nn.Embedding(1, 4), nn.LayerNorm(4)
        self.experts, self.experts_bias = nn.Parameter(torch.ones(3, 4, 4)), nn.Parameter(torch.ones(3, 4))
        self.A_log, self.D = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 2))
        self.mix, self.steps = nn.Parameter(torch.ones(1, 1, 4)), nn.Parameter(torch.ones(4, 2))
        self.steps._no_weight_decay = True  # type: ignore[attr-defined]


def test_roles_of_own_code_follow_its_modules_and_marks() -> None:
    found = named(OwnModels(cast("Any", None)).anatomy(OwnMixer()))
    by_role = {role: {name for name, its in found.items() if its == role} for role in Role}
    assert by_role[Role.MATRIX] == {"map.weight", "gate.weight"}
    assert by_role[Role.TABLE] == {"rows.weight"}
    assert by_role[Role.WEIGHT] == {"conv.weight", "experts"}
    biases = {f"{name}.bias" for name in ("map", "gate", "conv", "norm")} | {"experts_bias"}
    assert by_role[Role.VECTOR] == biases | {"norm.weight", "A_log", "D", "mix", "steps"}


class Uses(TorchFunctionMode):
    """Recorder of the functions that get a parameter itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.found = defaultdict[str, set[str]](set)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = MULTIPLIER.get(name := getattr(func, "__name__", ""))
        for one in args if number is None else args[number : number + 1]:
            if isinstance(one, nn.Parameter) and id(one) in self._names:
                self.found[self._names[id(one)]].add(name)
        return func(*args, **(kwargs or {}))


BY_ELEMENT = {"exp", "mul", "__mul__", "__rmul__", "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "neg"}


@pytest.mark.parametrize("family", ["gpt2", "jamba", "mamba", "qwen3_moe", "rwkv", "xlnet", *drawn(OTHERS, 4)])
def test_matrices_of_a_family_are_those_that_it_multiplies_by(family: str) -> None:
    if (found := roles(family)) is None:
        pytest.skip("refused")
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(family)), dtype=torch.float32).eval()
    fill(model)
    with Uses(model) as uses, torch.no_grad():
        model(input_ids=torch.arange(2, 14)[None], use_cache=False)
    # Corrections of routers, which steps do not train, are buffers here.
    for name, functions in ((name, functions) for name, functions in uses.found.items() if name in found):
        if functions & MULTIPLIER.keys():
            assert found[name] in (Role.MATRIX, Role.TABLE), f"{name} is multiplied by"
        if functions & BY_ELEMENT:
            assert found[name] not in (Role.MATRIX, Role.TABLE), f"{name} is used by {functions & BY_ELEMENT}"
