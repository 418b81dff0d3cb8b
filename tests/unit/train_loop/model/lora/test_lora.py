"""Targets of adapters, their refusals, and their injection on the meta device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoConfig, AutoModel

from tests.support.builders.any_size import GPT2, MOE
from tests.support.builders.specs import TINY, spec
from tests.support.families.encoders import FAMILIES, OTHERS
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.extras import install
from train_loop.model.build import materialise
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.choose import family_of
from train_loop.model.lora.adapters import (
    draw_adapters,
    inject_adapters,
    lora_checks,
    lora_notes,
    trained_parameters,
)
from train_loop.model.lora.names import by_plain_name
from train_loop.model.lora.reads import reads_weight
from train_loop.model.lora.saved import choose
from train_loop.model.lora.targets import find_targets
from train_loop.spec import JobSpec

ENCODERS = FAMILIES | OTHERS
TIED = TINY | {"tie_word_embeddings": True}
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def job(lora: dict[str, Any], config: dict[str, Any] = TINY, **model: Any) -> JobSpec:
    return spec(model={"config": config, "lora": lora, **model})


def built(one: JobSpec) -> Anatomy:
    return family_of(one).build(one.model)


def faults(one: JobSpec) -> dict[str, str]:
    found = dict[str, str]()
    for check in lora_checks(built(one), one):
        try:
            check.check()
        except ModelError as error:
            found[check.pointer.removeprefix("/model/")] = str(error)
    return found


def names_of(lora: dict[str, Any], config: dict[str, Any] = TINY) -> list[str]:
    one = job(lora, config)
    targets = find_targets(choose(built(one), one.model))
    return [*targets.modules, *targets.parameters]


def test_all_linear_leaves_out_head_and_routers() -> None:
    names = names_of({})
    assert len(names) == 2 * len(LAYER)
    assert {name.rpartition(".")[2] for name in names} == {*LAYER}
    of_experts = {name.rpartition(".")[2] for name in names_of({}, MOE)}
    assert of_experts == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {name.rpartition(".")[2] for name in names_of({}, GPT2)} == {"c_attn", "c_proj", "c_fc"}


def test_all_linear_leaves_out_layers_whose_weights_are_read_without_a_call() -> None:
    mamba = {"model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    mamba |= {"num_heads": 8, "n_groups": 1, "state_size": 8}
    assert {name.rpartition(".")[2] for name in names_of({}, mamba)} == {"in_proj"}
    message = faults(job({"target_modules": ["out_proj"]}, mamba))["lora/target_modules"]
    assert "whose weight the code of its model may use without a call of the module" in message


def test_names_match_whole_paths_or_their_ends() -> None:
    assert names_of({"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]}) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert names_of({"target_modules": ["q_proj"], "layers": [1]}) == ["model.layers.1.self_attn.q_proj"]
    assert names_of({"target_modules": [], "target_parameters": ["experts.down_proj"]}, MOE) == [
        "model.layers.0.mlp.experts.down_proj"
    ]


@pytest.mark.parametrize(
    ("lora", "config", "field", "message"),
    [
        (
            {"target_modules": ["q_prj"]},
            TINY,
            "target_modules",
            "target_modules q_prj matches no module; choose for example q_proj, ",
        ),
        (
            {"target_modules": ["mlp"]},
            TINY,
            "target_modules",
            "target_modules mlp matches model.layers.0.mlp, a Qwen3MLP, and adapters are for linear layers; ",
        ),
        (
            {"target_modules": ["lm_head"]},
            TINY,
            "target_modules",
            "matches lm_head, which can only be trained whole; name it in modules_to_save",
        ),
        (
            {"target_modules": ["embed_tokens"]},
            TIED,
            "target_modules",
            "matches model.embed_tokens, whose weights embeddings and head share (tie_word_embeddings): an adapter ",
        ),
        (
            {"modules_to_save": ["lm_head"]},
            TIED,
            "modules_to_save",
            "matches lm_head, whose weights another module shares (tie_word_embeddings); peft would train one of both",
        ),
        (
            {"modules_to_save": ["heads"]},
            TINY,
            "modules_to_save",
            "modules_to_save heads matches no module with parameters; choose for example lm_head, ",
        ),
        ({"target_modules": ["gate"]}, MOE, "target_modules", "a router of experts, which can only be trained whole"),
        (
            {"target_modules": ["experts"]},
            MOE,
            "target_modules",
            "holds experts as tensors; name these in target_parameters: experts.gate_up_proj, experts.down_proj",
        ),
        (
            {"target_parameters": ["up_proj"]},
            MOE,
            "target_parameters",
            "matches no parameter; choose for example experts.gate_up_proj, experts.down_proj",
        ),
        (
            {"target_parameters": ["gate.weight"]},
            MOE,
            "target_parameters",
            "matches model.layers.0.mlp.gate.weight, which is not a tensor with a matrix of each expert; ",
        ),
        (
            {"target_parameters": ["experts.down_proj"]},
            TINY,
            "target_parameters",
            "target_parameters experts.down_proj matches no parameter; the model has none; remove it",
        ),
        (
            {"modules_to_save": ["layers"]},
            TINY,
            "modules_to_save",
            "modules_to_save layers matches model.layers, a ModuleList, which peft cannot train whole; name modules ",
        ),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["lf_attn"]},
            TINY,
            "target_modules",
            "target_modules q_proj matches model.layers.0.self_attn.q_proj, and modules_to_save lf_attn the module "
            "around it by an end inside of a name: peft would train it whole and adapt it; write the whole name",
        ),
        ({"layers": [0, 2]}, TINY, "layers", "layers 2 is none of the 2 layers of the model; choose 0 to 1"),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
            TINY,
            "target_modules",
            "target_modules q_proj matches no module of layers=all outside of those that are trained whole "
            "(model.layers.0.self_attn, model.layers.1.self_attn); change one of them",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused(
    lora: dict[str, Any], config: dict[str, Any], field: str, message: str
) -> None:
    found = faults(job(lora, config))
    assert [*found] == [f"lora/{field}"]
    assert message in found[f"lora/{field}"]


def headless(folder: Path, family: str, **config: Any) -> JobSpec:
    """Return a job that adapts an encoder's head of tokens above a folder without it."""
    small_one = {"model_type": family, "vocab_size": 60} | ENCODERS[family] | config
    AutoModel.from_config(AutoConfig.for_model(**small_one)).save_pretrained(folder)
    head = {"masked_lm": {"mask_token": 4, "special_tokens": [1]}}
    return spec(model={"config": None, "path": str(folder), "lora": {}, "head": head}, data={"packing": False})


def test_random_weights_above_a_folder_are_trained_whole_or_refused(tmp_path: Path) -> None:
    # The bias of a tied head begins at zero, and its matrix is that of the embeddings.
    saved = {"tied": ("cls.predictions.transform",), "untied": ("cls",)}
    for name, modules in saved.items():
        one = headless(tmp_path / name, "bert", tie_word_embeddings=name == "tied")
        assert faults(one) == {}
        assert choose(built(one), one.model).saved == modules
    # Its bias has two names.
    assert faults(headless(tmp_path / "luke", "luke")) == {
        "lora/modules_to_save": f"model.lora would freeze lm_head.decoder.weight, which {tmp_path}/luke lacks, so that "
        "it is random, and no export of adapters could have it; give a folder that has it, such as one of trainshed "
        "export --merged, or remove lora"
    }


def test_targets_that_reach_only_shared_experts_are_warned_of() -> None:
    for config, lora, warned in (
        (small("qwen2_moe"), {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, True),
        (small("qwen2_moe"), {}, True),
        (small("qwen2_moe"), {"target_modules": ["q_proj"]}, False),
        (small("qwen2_moe"), {"target_parameters": ["experts.down_proj"]}, False),
        (MOE, {}, False),
        (TINY, {}, False),
    ):
        one = job(lora, config)
        notes = lora_notes(built(one), one.model)
        assert len(notes) == warned
        assert all(
            "model.layers.0.mlp.shared_expert.gate_proj and 5 others, and none of the 4 routed" in n for n in notes
        )
        remedy = "to adapt them, set target_parameters: [experts.gate_up_proj, experts.down_proj]"
        assert all(n.endswith(remedy) for n in notes)


@pytest.mark.parametrize("names", [["gate_proj", "up_proj", "down_proj"], ["w1", "w2", "w3"]])
def test_names_of_routed_experts_are_answered_with_target_parameters(names: list[str]) -> None:
    config = small("mixtral") if "w1" in names else MOE
    assert faults(job({"target_modules": names}, config)) == {
        "lora/target_modules": f"target_modules {names[0]} matches no module; experts are tensors: to adapt them, set "
        "target_parameters: [experts.gate_up_proj, experts.down_proj]"
    }


def test_weights_that_settings_keep_from_being_read_have_adapters() -> None:
    assert {name.rpartition(".")[2] for name in names_of({}, small("bloom"))} == {
        *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
    }
    slow = small("bloom") | {"slow_but_exact": True, "pretraining_tp": 2}
    assert {name.rpartition(".")[2] for name in names_of({}, slow)} == {"query_key_value", "dense_h_to_4h"}


class Reader(nn.Module):
    """A module whose code reads weights in branches."""

    def __init__(self, *, fast: bool, size: int) -> None:
        super().__init__()
        self.fast, self.size = fast, size
        self.a, self.b, self.c, self.d = (nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        """Read weights."""
        if not self.fast and self.size > 1:
            return self.a.weight
        if self.fast or x.ndim > 1:
            return self.b.weight
        if x.ndim:
            return self.c.weight
        return self.d.weight.dtype


@pytest.mark.parametrize(("fast", "size", "read"), [(True, 2, "bc"), (False, 2, "abc"), (False, 1, "bc")])
def test_weights_in_branches_that_settings_rule_out_are_not_read(fast: bool, size: int, read: str) -> None:
    model = nn.ModuleDict({"one": Reader(fast=fast, size=size)})
    assert "".join(leaf for leaf in "abcd" if reads_weight(model, f"one.{leaf}")) == read


def test_balance_of_frozen_routers_is_refused() -> None:
    config = TINY | {"model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 12, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    found = faults(job({}, config, router_bias_update=0.001))
    assert "has no effect, because model.lora freezes each router of Glm4MoeForCausalLM" in found["router_bias_update"]
    assert faults(job({"modules_to_save": ["mlp.gate"]}, config, router_bias_update=0.001)) == {}


@pytest.mark.parametrize("config", [TINY, GPT2, MOE])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
def test_only_adapters_are_trained_in_fp32_and_the_base_keeps_its_names(config: dict[str, Any], master: str) -> None:
    lora = {"r": 2} | ({"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]} if config is MOE else {})
    one = job(lora, config, master_dtype=master)
    anatomy = built(one)
    before = {name: p.shape for name, p in anatomy.model.named_parameters()}
    head, layers = anatomy.head, anatomy.layers
    inject_adapters(anatomy, one.model)
    trained = trained_parameters(anatomy.model)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in trained)
    frozen = ((name, p) for name, p in anatomy.model.named_parameters() if not p.requires_grad)
    assert {name: p.shape for name, p in by_plain_name(anatomy.model, frozen).items()} == before
    again = anatomy.family.anatomy(anatomy.model)
    assert again.head is head
    assert again.layers == layers
    assert all(p.is_meta for p in anatomy.model.parameters())


def test_dense_layers_of_a_mixture_are_not_taken_for_experts() -> None:
    one = job({"r": 2}, MOE | {"num_hidden_layers": 2, "mlp_only_layers": [0]})
    anatomy = built(one)
    targets = find_targets(choose(anatomy, one.model))
    assert "model.layers.0.mlp.gate_proj" in targets.modules
    inject_adapters(anatomy, one.model)
    trained = {name.partition(".lora_")[0] for name in trained_parameters(anatomy.model)}
    assert trained == {*targets.modules}


def test_head_of_labels_is_trained_whole() -> None:
    head = {"sequence_classification": {"labels": 3}}
    one = spec(
        model={"config": TINY | {"pad_token_id": 0}, "lora": {"r": 2}, "head": head},
        data={"columns": {"text": "text", "label": "label"}, "packing": False},
    )
    anatomy = built(one)
    inject_adapters(anatomy, one.model)
    assert {name for name in trained_parameters(anatomy.model) if "lora" not in name} == {"score.weight"}


@pytest.mark.parametrize("init", ["kaiming", "gaussian"])
def test_initial_values_follow_the_rule_of_peft_and_the_name(init: str) -> None:
    one = job({"r": 4, "init": init}, TINY | {"hidden_size": 512})
    anatomy, chosen = built(one), one.model.lora
    assert chosen is not None
    blueprint = family_of(one).build(one.model)
    inject_adapters(anatomy, one.model)
    model = anatomy.model
    materialise(model, blueprint, seed=0, device=torch.device("cpu"))
    draw_adapters(model, chosen, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    drawn = {name: p.clone() for name, p in trained_parameters(model).items()}
    assert all(p.abs().sum() == 0 for name, p in drawn.items() if "lora_B" in name)
    draw_adapters(model, chosen, seed=0, dtype=torch.float32, device=torch.device("cpu"))
    assert all(torch.equal(p, drawn[name]) for name, p in trained_parameters(model).items())
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(drawn[f"{name}.lora_A.default.weight"], drawn[f"{name[:-6]}k_proj.lora_A.default.weight"])
    layer: Any = model.get_submodule(name)
    assert isinstance(layer, LoraLayer)
    assert layer.scaling == {"default": 8.0}
    ours = drawn[f"{name}.lora_A.default.weight"]
    layer.reset_lora_parameters("default", True if init == "kaiming" else init)
    theirs: nn.Parameter = layer.lora_A["default"].weight
    assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.1)
    bound = 1 / math.sqrt(512) if init == "kaiming" else math.inf
    assert ours.abs().max() <= bound


def test_missing_package_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    assert faults(job({}))["lora"].startswith("model.lora needs peft, which cannot be imported here (")
    assert f"; run {install('peft')} on service and workers, or remove lora" in faults(job({}))["lora"]
