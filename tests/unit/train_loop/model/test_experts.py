"""Mixtures of experts: published layouts of weights in both directions, sizes, names of experts, refused settings."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from tests.support.builders.specs import may_read, raw_spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.loop.objectives.routed import IDLE_STEPS, IdleExperts, remedy_of
from train_loop.model.families.causal.experts import choose_experts
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.family import Split, Unchanged
from train_loop.model.load import Stored, match_folder
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import ModelSpec, SpecError, parse


def published(family: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return a model of transformers, and the tensors that it has written into a folder."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small(family)))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_()
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v3", "kimi_linear"])
def test_published_layout_is_read_by_rows_and_written_back_bit_equal(family: str, tmp_path: Path) -> None:
    model, stored = published(family, tmp_path)
    anatomy = CAUSAL.build(ModelSpec(path=str(tmp_path), dtype="fp32"))
    homes, expected = match_folder(anatomy, tmp_path).homes, model.state_dict()
    for name, (first, *_) in homes.items():
        whole = expected[name]
        every = tuple(slice(0, size) for size in whole.shape)
        assert torch.equal(first.read(every), whole), name
        if whole.ndim > 1:
            for rows in (slice(1, 3), slice(len(whole), len(whole))):
                assert torch.equal(first.read((rows, *every[1:])), whole[rows]), name
    shapes = {name: tuple(expected[name].shape) for name in homes}
    parts: dict[str, Split] = {name: Unchanged(name, shape) for name, shape in shapes.items()}
    parts |= CAUSAL.splits(anatomy.model, shapes)
    written = {one: torch.full(shape, torch.nan) for split in parts.values() for one, shape in split.shapes.items()}
    for name, split in parts.items():
        each = 3 if split.by_row and expected[name].ndim else max(len(expected[name]), 1)
        for start in range(0, len(expected[name]), each):
            for one, cut in split.cut(expected[name][start : start + each], start).items():
                written[one][cut.first : cut.first + len(cut.values)] = cut.values
    assert written.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(written[name], stored[name])] == []


def test_a_rank_reads_only_the_experts_of_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published("qwen3_moe", tmp_path)
    anatomy = CAUSAL.build(ModelSpec(path=str(tmp_path), dtype="fp32"))
    (joined,) = match_folder(anatomy, tmp_path).homes["model.layers.0.mlp.experts.gate_up_proj"]
    read, plain = list[str](), Stored.read

    def note(stored: Stored, part: tuple[slice, ...]) -> Tensor:
        read.append(stored.name)
        return plain(stored, part)

    monkeypatch.setattr(Stored, "read", note)
    joined.read((slice(2, 3), slice(None), slice(None)))
    assert read == [f"model.layers.0.mlp.experts.2.{name}_proj.weight" for name in ("gate", "up")]


PLACE = "model.layers.1.mlp.experts."


def change(stored: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Return the tensors of a folder with a fault."""
    up, whole = f"{PLACE}3.up_proj.weight", stored[f"{PLACE}3.up_proj.weight"]
    others = {name: tensor for name, tensor in stored.items() if name != up}
    return {
        "lacks one": others,
        "other number": others | {f"{PLACE}8.up_proj.weight": whole},
        "one more": stored | {f"{PLACE}8.up_proj.weight": whole.clone()},
        "whole too": stored | {f"{PLACE}gate_up_proj": torch.zeros(8, 64, 64)},
        "no gates": {name: tensor for name, tensor in stored.items() if "gate_proj" not in name},
        "other shape": others | {up: whole[:16].clone()},
        "fp8": others | {up: whole.to(torch.float8_e4m3fn)},
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("lacks one", f"missing: {PLACE}3.up_proj.weight;"),
        ("other number", f"missing: {PLACE}3.up_proj.weight; unexpected: {PLACE}8.up_proj.weight [32, 64];"),
        ("one more", f"unexpected: {PLACE}8.up_proj.weight [32, 64];"),
        ("whole too", f"unexpected: {PLACE}gate_up_proj [8, 64, 64];"),
        ("no gates", "none named mlp.experts.*.gate_proj.weight; copy the folder again"),
        ("other shape", f"{PLACE}3.up_proj.weight of shape [16, 64]; copy the folder again"),
        ("fp8", "holds quantised weights, which cannot be trained: model.layers.1.mlp.experts"),
    ],
)
def test_folder_with_other_experts_than_the_config_is_rejected(kind: str, message: str, tmp_path: Path) -> None:
    _, stored = published("qwen3_moe", tmp_path)
    save_file(change(stored, kind), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(message)):
        match_folder(CAUSAL.build(ModelSpec(path=str(tmp_path), dtype="fp32")), tmp_path)


def test_quantised_folder_is_rejected(tmp_path: Path) -> None:
    AutoConfig.for_model(**small("gpt_oss"), quantization_config={"quant_method": "mxfp4"}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds quantised weights .mxfp4., which cannot be trained"):
        CAUSAL.build(ModelSpec(path=str(tmp_path), dtype="fp32"))


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "afmoe", "lfm2_moe", "minimax_m2"])
def test_biases_that_balance_experts_stay_in_fp32(family: str) -> None:
    anatomy = CAUSAL.build(ModelSpec(config=small(family), dtype="bf16", master_dtype="bf16"))
    model, experts = anatomy.model, anatomy.experts
    assert experts is not None
    assert list(experts.balanced) == list(range(len(experts.modules)))
    assert {module.get_buffer(name).numel() for module, name in experts.balanced.values()} == {experts.number}
    found = {name: buffer.dtype for name, buffer in model.named_buffers() if re.search("correction|expert_bias", name)}
    assert found
    assert set(found.values()) == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_few_kernels_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)
    CAUSAL.build(ModelSpec(config=small("qwen3")))
    assert "LRU_CACHE_CAPACITY" not in os.environ
    CAUSAL.build(ModelSpec(config=small("qwen3_moe")))
    assert (os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], os.environ["LRU_CACHE_CAPACITY"]) == ("64", "64")


def test_experts_of_sizes_that_grouped_products_do_not_accept_compute_eagerly() -> None:
    for size, chosen in ((21, "eager"), (24, "grouped_mm")):
        job = parse(raw_spec(model={"config": small("qwen3_moe") | {"moe_intermediate_size": size}, "dtype": "bf16"}))
        model: Any = CAUSAL.build(job.model).model
        CAUSAL.choose_attention(model, job, torch.device("cpu"))
        assert model.config._experts_implementation == chosen
        assert check_model(job, may_read())[1] == []


@pytest.fixture
def threads() -> Iterator[None]:
    """Compute with two threads, and as torch does by default."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(False)
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1], warn_only=True)


@pytest.mark.usefixtures("threads")
def test_gradients_on_several_threads_have_the_same_bits_each_time() -> None:
    job = parse(raw_spec(model={"config": small("qwen3_moe"), "dtype": "fp32"}))
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small("qwen3_moe")), dtype=torch.float32)
    choose_experts(model, job, torch.device("cpu"))
    hidden, found = torch.randn(2048, 64, requires_grad=True), list[Tensor]()
    weights, chosen = torch.rand(2048, 8).topk(4)
    for _ in range(6):
        out = model.model.layers[0].mlp.experts(hidden, chosen, weights)
        found += torch.autograd.grad(out, hidden, torch.ones_like(out))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("chosen", [0, 9])
def test_token_that_uses_more_experts_than_there_are_is_rejected(chosen: int) -> None:
    with pytest.raises(
        ModelError, match=f"has 8 experts in each layer, of which a token uses {chosen} .*choose 1 to 8"
    ):
        CAUSAL.build(ModelSpec(config=small("qwen3_moe") | {"num_experts_per_tok": chosen}))


@pytest.mark.parametrize(("stated", "found"), [({}, 0), ({"router_logits": OutputRecorder(nn.Linear, index=0)}, 9)])
def test_version_of_transformers_that_does_not_name_each_router_is_rejected(
    stated: dict[str, Any], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_can_record_outputs", stated)
    with pytest.raises(ModelError, match=f"names {found} routers for the 2 layers .*install a newer version"):
        CAUSAL.build(ModelSpec(config=small("qwen3_moe")))


def test_routers_are_found_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = {"router_logits": OutputRecorder(nn.Linear, index=0, layer_name="q_proj")}
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_can_record_outputs", stated)
    anatomy = CAUSAL.build(ModelSpec(config=small("qwen3_moe")))
    assert anatomy.experts is not None
    assert anatomy.experts.routers == tuple(layer.self_attn.q_proj for layer in anatomy.layers)  # type: ignore[union-attr]


def test_plan_counts_the_parameters_that_a_token_uses() -> None:
    shape, problems = check_model(parse(raw_spec(model={"config": small("qwen3_moe")})), may_read())
    assert problems == []
    assert shape is not None
    expert = 3 * 64 * 32  # gate, up and down of hidden_size 64 and moe_intermediate_size 32
    assert shape.active == shape.parameters - 2 * 6 * expert  # six of eight experts in two layers
    plan = plan_job(parse(raw_spec(model={"config": small("qwen3_moe")})), shape)
    assert plan.warnings == ()
    assert "as counted in a call of its layers" in {term.name: term.formula for term in plan.memory}["activations"]
    assert check_model(parse(raw_spec()), may_read())[0].active is None  # type: ignore[union-attr]


ODD = small("qwen3_moe") | {"moe_intermediate_size": 20}
BALANCE = {"router_bias_update": 0.001}
NO_BIAS = "none named e_score_correction_bias or expert_bias; remove router_bias_update"
ANY_SIZE = {"reproducible": "any_size", "global_batch_size": 4}
AUTO_SIZE = {"per_device_train_batch_size": "auto", "global_batch_size": 4}
BY_MICRO_BATCH = (
    "per_device_train_batch_size=auto depends on the memory of the workers, and the loss of routers of "
    "Qwen3MoeForCausalLM on the size of micro-batches (router_aux_loss.scope=micro); set router_aux_loss.scope: "
    "sequence, or write a number"
)
ULYSSES = {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}
NONE = "is for families whose code has an auxiliary loss, and that of DeepseekV3ForCausalLM has none"


@pytest.mark.parametrize(
    ("family", "parts", "pointer", "message"),
    [
        ("qwen3_moe", {"model": {"compile": True}}, "/model/compile", "compile is not proven for experts"),
        (
            "qwen3_moe",
            {"training": ANY_SIZE | {"router_z_loss": 0.1}},
            "/training/reproducible",
            "router_aux_loss.scope: seq",
        ),
        *(
            ("qwen3_moe", {"training": AUTO_SIZE | losses}, "/training/per_device_train_batch_size", BY_MICRO_BATCH)
            for losses in ({"router_aux_loss": {"coef": 0.1}}, {"router_z_loss": 0.1})
        ),
        (
            "qwen3_moe",
            {"training": ANY_SIZE, **ULYSSES},
            "/training/reproducible",
            "not proven for the experts of Qwen3Moe",
        ),
        (
            "deepseek_v3",
            {"training": ANY_SIZE, "model": BALANCE},
            "/training/reproducible",
            "with router_bias_update; ",
        ),
        (
            "qwen3_moe",
            {"strategy": {"wrap_policy": {"moe_experts": ["MixtralExperts"]}}},
            "/strategy/wrap_policy/moe_experts",
            "names no experts of Qwen3MoeForCausalLM; choose Qwen3MoeExperts",
        ),
        ("qwen3", {"strategy": {"wrap_policy": {"moe_experts": ["X"]}}}, "/strategy/wrap_policy/moe_experts", "has no"),
        ("qwen3", {"model": {"experts_implementation": "eager"}}, "/model/experts_implementation", "has no effect on"),
        ("qwen3", {"model": {"router_dtype": None}}, "/model/router_dtype", "router_dtype=null has no effect on"),
        (
            "qwen3",
            {"strategy": {"efsdp_size": 1}},
            "/strategy/efsdp_size",
            "efsdp_size=1 has no effect on Qwen3ForCausalLM, w",
        ),
        ("qwen3", {"training": {"router_z_loss": 0.1}}, "/training/router_z_loss", "has no effect on Qwen3ForCausalLM"),
        (
            "qwen3",
            {"model": BALANCE},
            "/model/router_bias_update",
            "router_bias_update has no effect on Qwen3ForCausal",
        ),
        ("qwen3_moe", {"model": BALANCE}, "/model/router_bias_update", f"{NO_BIAS}, and set training.router_aux_loss"),
        ("deepseek_v2", {"model": BALANCE}, "/model/router_bias_update", "and DeepseekV2ForCausalLM has none named"),
        (
            "deepseek_v3",
            {"model": BALANCE | {"freeze_module_prefix": ["model.layers.1.mlp.gate"]}},
            "/model/router_bias_update",
            "has no effect, because freeze_module_prefix freezes each router of DeepseekV3ForCausalLM",
        ),
        ("deepseek_v3", {"training": {"router_aux_loss": {"coef": 0.1}}}, "/training/router_aux_loss", NONE),
        ("deepseek_v3", {"training": {"router_aux_loss": {"scope": "sequence"}}}, "/training/router_aux_loss", NONE),
        ("deepseek_v3", {"training": {"router_z_loss": 0.1}}, "/training/router_z_loss", NONE),
        (
            "qwen3_moe",
            {"training": {"router_aux_loss": {"scope": "sequence"}}},
            "/training/router_aux_loss",
            "scope=sequence has no effect, because the loss has the weight 0 by the config of Qwen3MoeForCausalLM",
        ),
        (
            "qwen3_moe",
            {"model": {"experts_implementation": "grouped_mm", "config": ODD, "dtype": "bf16"}},
            "/model/experts_implementation",
            "needs rows of a multiple of 16 bytes, and experts of Qwen3MoeForCausalLM have sizes of 20 in bf16",
        ),
    ],
)
def test_setting_that_does_not_fit_is_rejected(family: str, parts: Any, pointer: str, message: str) -> None:
    model = {"config": small(family)} | parts.get("model", {})
    _, problems = check_model(parse(raw_spec(**parts | {"model": model})), may_read())
    assert [problem.pointer for problem in problems] == [pointer]
    assert message in problems[0].message


LOSSES: list[dict[str, Any]] = [
    {"router_z_loss": 0.1},
    {"router_aux_loss": {"coef": 0.0}},
    {"router_aux_loss": {"coef": 0.1}},
    {"router_aux_loss": {"coef": 0.1, "scope": "sequence"}, "router_z_loss": 0.1},
]


@pytest.mark.parametrize(("losses", "warns"), list(zip(LOSSES, (True, False, True, False), strict=True)))
def test_plan_says_that_a_loss_depends_on_the_micro_batch(losses: dict[str, Any], *, warns: bool) -> None:
    job = parse(raw_spec(model={"config": small("qwen3_moe")}, training=losses))
    shape, problems = check_model(job, may_read())
    assert shape is not None, problems
    warnings = [one for one in plan_job(job, shape).warnings if one.startswith("the loss of routers is a mean over a")]
    assert len(warnings) == warns
    sizes = parse(raw_spec(model={"config": small("qwen3_moe")}, training=AUTO_SIZE | losses))
    assert bool(check_model(sizes, may_read())[1]) == warns


def test_loss_of_a_whole_step_is_rejected_with_the_reason() -> None:
    with pytest.raises(SpecError, match="counts of all micro-batches before the first backward pass"):
        parse(raw_spec(training={"router_aux_loss": {"scope": "step"}}))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"training": {"router_bias_update": 0.001}}, "did you mean model.router_bias_update?"),
        ({"model": {"bias_update_speed": 0.001}}, "use model.router_bias_update"),
        ({"model": {"router_bias_update": 0}}, "greater than 0"),
        ({"model": {"router_bias_update": 1.5}}, "less than or equal to 1"),
        ({"model": {"router_bias_update": True}}, "router_bias_update"),
    ],
)
def test_balance_of_experts_is_one_field_with_a_range(parts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        parse(raw_spec(**parts))
    assert parse(raw_spec(model={"router_bias_update": 0.001})).model.router_bias_update == 0.001


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "Qwen3MoeMLP"])
def test_names_of_experts_of_other_tools_are_understood(name: str) -> None:
    config = {"model": {"config": small("qwen3_moe")}}
    policy = {"wrap_policy": {"moe_experts": [name]}, "apply_expert_patch": True}
    assert check_model(parse(raw_spec(**config, strategy=policy)), may_read())[1] == []


def test_own_config_decides_about_the_auxiliary_loss() -> None:
    for on, weight in ((True, 0.001), (False, 0.0)):
        config = small("qwen3_moe") | {"output_router_logits": on, "router_aux_loss_coef": 0.001}
        anatomy = CAUSAL.build(ModelSpec(config=config, dtype="fp32"))
        assert anatomy.experts is not None
        assert anatomy.experts.auxiliary == weight
        assert check_model(parse(raw_spec(model={"config": config})), may_read())[1] == []


@pytest.mark.parametrize(
    ("family", "remedy"),
    [
        ("deepseek_v3", "model.router_bias_update"),
        ("qwen3_moe", "router_aux_loss.coef"),
        ("deepseek_v2", "larger glob"),
    ],
)
def test_remedy_for_experts_without_tokens_is_one_that_the_family_has(family: str, remedy: str) -> None:
    experts = CAUSAL.build(ModelSpec(config=small(family))).experts
    assert experts is not None
    assert remedy in remedy_of(experts)


def test_experts_without_tokens_are_reported_every_idle_steps() -> None:
    idle, loads = IdleExperts(), [[5, 0], [3, 4]]
    idle.begin = 7  # the step of the checkpoint
    found = {step: news for step in range(17, 2 * IDLE_STEPS + 18, 10) if (news := idle.news(loads, step=step))}
    assert found == {7 + IDLE_STEPS: [(0, 1)], 7 + 2 * IDLE_STEPS: [(0, 1)]}
    assert idle.news([[5, 1], [3, 4]], step=400) == []
