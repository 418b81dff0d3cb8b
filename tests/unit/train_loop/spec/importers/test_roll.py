"""Import of ROLL's configurations: every FSDP2 file of its public examples, and the meaning of each field."""

from typing import Any

import pytest
import yaml

from tests.unit.train_loop.spec.importers.cases import (
    beside,
    documents,
    fates,
    imported,
    job,
    marked,
    mesh_of,
    unreported,
)
from train_loop.spec import InferJobSpec, LoraSpec, SpecError, parse_any
from train_loop.spec.importers import Outcome
from train_loop.spec.importers.defaults import ToolDefault
from train_loop.spec.importers.references import compose, resolve
from train_loop.spec.importers.roll.defaults import defaults_of

FILES = documents("roll.yaml")
SFT = "examples/qwen3-30BA3B-sft_fsdp2/sft_config_ep.yaml"


def block(**parts: Any) -> dict[str, Any]:
    """Return a small pipeline of SFT with parts of its worker replaced."""
    worker: dict[str, Any] = {
        "model_args": {"dtype": "bf16"},
        "training_args": {"learning_rate": 1e-5},
        "data_args": {"file_name": "/data/rows.jsonl"},
        "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": {"param_dtype": "bf16"}},
        "device_mapping": "list(range(0,8))",
    }
    for name, part in parts.items():
        worker[name] = {**worker.get(name, {}), **part} if isinstance(part, dict) else part
    return {"exp_name": "Qwen3 SFT!", "pretrain": "/models/m", "sequence_length": 2048, "sft_train": worker}


def config(**options: Any) -> dict[str, Any]:
    return block(strategy_args={"strategy_name": "fsdp2_train", "strategy_config": {"param_dtype": "bf16", **options}})


@pytest.mark.parametrize("name", FILES)
def test_every_public_example_imports_and_reports_every_field(name: str) -> None:
    found = imported(FILES[name])
    spec = job(found)
    raw = yaml.safe_load(FILES[name])
    whole = resolve(compose(raw, beside))
    assert unreported(found, {**whole, **({"defaults": raw["defaults"]} if "defaults" in raw else {})}) == set()
    assert [row for row in found.rows if row.outcome is Outcome.UNKNOWN] == []
    worker = found.formats[0].removeprefix("ROLL, worker ")
    source: Any = whole[worker]
    options = source["strategy_args"]["strategy_config"]
    mesh = mesh_of(spec)
    assert mesh.fsdp == min(options["fsdp_size"], spec.scaling.world) or options["fsdp_size"] <= 1
    assert spec.training.learning_rate == source["training_args"]["learning_rate"]
    assert spec.strategy.ulysses_size == source["model_args"].get("ulysses_size", 1)
    assert spec.strategy.ep_size == options.get("ep_size", 1)
    assert "(loop)" in marked(found)
    assert {str(row.target) for row in found.needed} >= {"model.path"}


def test_pipeline_of_sft_becomes_the_same_job() -> None:
    found = imported(FILES[SFT])
    spec = job(found)
    assert (spec.name, spec.model.path) == ("qwen3-30ba3b-sft-config", "file:///models/Qwen3-30B-A3B-Base")
    assert (spec.strategy.fsdp_size, spec.strategy.ep_size, spec.strategy.efsdp_size) == (8, 8, 1)
    assert spec.strategy.wrap_policy.moe_experts == ("Qwen3MoeExperts",)
    assert (spec.model.dtype, spec.model.master_dtype, spec.strategy.reduce_dtype) == ("bf16", "bf16", "bf16")
    assert spec.model.experts_implementation == "eager"
    assert (spec.training.lr_scheduler_type, spec.training.seed, spec.training.num_train_epochs) == ("linear", 42, 1)
    assert (spec.data.packing, spec.data.shuffle, spec.data.sequence_length) == (False, False, 2048)
    assert (spec.data.columns.prompt, spec.data.columns.response) == ("instruction", "output")
    assert (spec.training.eval_steps, spec.checkpoint.every_steps, spec.scaling.world) == (100, 100, 8)
    assert spec.training.router_aux_loss.coef == 0
    assert any(row.changes_numbers and "auxiliary loss" in row.reason for row in found.rows)
    assert {row.target for row in found.needed} == {"model.path", "data.train.path", "data.eval.path"}
    assert marked(found) >= {"query_key", "sft_train.data_args.template"}


def test_worker_is_chosen_by_name_and_others_are_not_imported() -> None:
    raw = {**block(), "student": block()["sft_train"]}
    with pytest.raises(
        SpecError, match=r"2 workers with strategy_name=fsdp2_train, so choose one with --worker: sft_train"
    ):
        imported(raw)
    found = imported(raw, worker="student")
    assert found.formats == ("ROLL, worker student",)
    assert fates(found)["sft_train.device_mapping"] == (Outcome.NOT_IMPORTED, None)
    with pytest.raises(SpecError, match=r"invalid worker critic; workers with FSDP2 are sft_train \(fsdp2_train\)"):
        imported(raw, worker="critic")


@pytest.mark.parametrize("name", [name for name, text in FILES.items() if b"fsdp2_infer" in text])
def test_worker_that_only_computes_becomes_a_job_of_kind_infer(name: str) -> None:
    raw = yaml.safe_load(FILES[name])
    whole = resolve(compose(raw, beside))
    worker = next(path for path in ("reference", "teacher") if path in whole)
    found = imported(FILES[name], worker=worker)
    spec = parse_any(found.spec)
    assert isinstance(spec, InferJobSpec)
    assert unreported(found, {**whole, **({"defaults": raw["defaults"]} if "defaults" in raw else {})}) == set()
    assert [row for row in found.rows if row.outcome is Outcome.UNKNOWN] == []
    source: Any = whole[worker]
    assert spec.strategy.fsdp_size == source["strategy_args"]["strategy_config"]["fsdp_size"]
    assert spec.strategy.ulysses_size == source["model_args"].get("ulysses_size", 1)
    assert spec.infer.batch_size == source.get("infer_batch_size", 16)
    assert {row.target for row in found.needed} == {"model.path", "data.train.path"}


def test_field_with_the_default_of_roll_changes_nothing() -> None:
    empty = job(imported(block()))
    for target, answer in defaults_of("sft_train").items():
        if isinstance(answer, ToolDefault) and "training_args." in answer.field:
            name = answer.field.rpartition(".")[2]
            if name not in ("learning_rate", "gradient_checkpointing", "bf16"):
                assert job(imported(block(training_args={name: answer.value}))) == empty, target
    off = {"disable_gradient_checkpointing": False, "lora_target": None, "model_type": None, "lora_rank": 8}
    assert job(imported(block(model_args=off, use_sequence_packing=False))) == empty
    assert job(imported({**block(), "seed": 42, "max_grad_norm": 1.0, "logging_steps": 1})) == empty


@pytest.mark.parametrize(
    ("mapping", "workers"),
    [("list(range(0,8))", 8), ("[0, 1, 2]", 3), ([0, 1], 2), ("list(range(0,16,2)) + [20, 21]", 10)],
)
def test_device_mapping_is_counted(mapping: Any, workers: int) -> None:
    assert job(imported(block(device_mapping=mapping))).scaling.world == workers


@pytest.mark.parametrize(
    "mapping",
    [
        "__import__('os').system('true')",
        "list(range(10**9))",
        "list(range(0,100000))",
        "[]",
        "(" * 500,
        "x" * 5000,
        "8",
    ],
)
def test_device_mapping_that_is_no_list_is_refused_and_not_evaluated(mapping: str) -> None:
    with pytest.raises(SpecError, match="device_mapping") as refused:
        imported(block(device_mapping=mapping))
    assert refused.value.problems[0].pointer == "/sft_train/device_mapping"
    assert refused.value.problems[0].line is not None


def test_mesh_of_experts_follows_from_the_other_sizes() -> None:
    other = imported(config(fsdp_size=8, ep_size=4, efsdp_size=1, eddp=2))
    assert (job(other).strategy.ep_size, job(other).strategy.efsdp_size) == (4, 0)
    field = "sft_train.strategy_args.strategy_config"
    assert fates(other)[f"{field}.eddp"][0] is Outcome.NOT_NEEDED
    wrong = imported(config(fsdp_size=8, ep_size=4, efsdp_size=2, eddp=3))
    assert job(wrong).strategy.efsdp_size == 2
    assert fates(wrong)[f"{field}.eddp"][0] is Outcome.NOT_SUPPORTED
    without = imported(config(efsdp_size=2, eddp=4, fsdp_size=4))
    assert fates(without)[f"{field}.efsdp_size"] == (Outcome.NOT_NEEDED, None)


def test_precision_is_that_of_roll() -> None:
    spec = job(imported(config(reduce_dtype="float32")))
    assert (spec.model.dtype, spec.model.master_dtype, spec.strategy.reduce_dtype) == ("bf16", "bf16", "fp32")
    half = imported(config(param_dtype="float16"))
    assert (job(half).model.dtype, job(half).model.master_dtype) == ("fp16", "fp32")
    raw = block()
    raw["sft_train"]["strategy_args"]["strategy_config"] = None
    assert job(imported(raw)).model.master_dtype == "fp32"
    assert job(imported(block(training_args={"tf32": True}))).strategy.matmul_precision == "high"


def test_switches_of_roll_may_be_text() -> None:
    strategy = job(
        imported(config(offload_policy="true", reshard_after_forward="False", async_save_ckpt="false"))
    ).strategy
    assert (strategy.offload_policy, strategy.reshard_after_forward, strategy.async_save_ckpt) == (True, False, False)


def test_auxiliary_loss_of_roll_is_left_out_and_marked() -> None:
    found = imported(block(model_args={"moe_aux_loss_coef": 0.01}))
    assert job(found).training.router_aux_loss.coef == 0
    row = next(row for row in found.rows if row.field == "sft_train.model_args.moe_aux_loss_coef")
    assert (row.outcome, row.changes_numbers) == (Outcome.TRANSLATED, True)
    assert job(imported(block())).training.router_aux_loss.coef is None


def test_tiles_of_experts_and_towers_for_images_are_left_out() -> None:
    experts = imported(config(apply_tiled_mlp=True, tiled_num_shards=8, apply_expert_patch=True))
    assert (job(experts).strategy.apply_tiled_mlp, job(experts).strategy.tiled_num_shards) == (False, 4)
    assert job(imported(config(apply_tiled_mlp=True, tiled_num_shards=8))).strategy.tiled_num_shards == 8
    images = imported(block(model_args={"freeze_module_prefix": "vision_model"}))
    assert "sft_train.model_args.freeze_module_prefix" in marked(images)
    some = job(imported(block(model_args={"freeze_module_prefix": "model.visual, model.embed_tokens"})))
    assert some.model.freeze_module_prefix == ("model.embed_tokens",)


def test_gradients_and_optimizer_states_are_where_roll_has_them() -> None:
    last = config(reduce_scatter_during_grad_accumulation=False)
    last["is_offload_optimizer_states_in_train_step"] = True
    spec = job(imported(last))
    assert (spec.strategy.gradient_sync, spec.strategy.offload_policy) == ("last", "optimizer")
    half = imported(config(reduce_scatter_during_grad_accumulation=False, reduce_dtype="bf16"))
    assert job(half).strategy.gradient_sync == "every"
    field = "sft_train.strategy_args.strategy_config.reduce_scatter_during_grad_accumulation"
    assert fates(half)[field] == (Outcome.NOT_SUPPORTED, None)


@pytest.mark.parametrize(
    ("given", "lora"),
    [
        ({"lora_target": "all"}, {"r": 8, "alpha": 16}),
        ({"lora_target": "all-linear", "lora_rank": 32, "lora_dropout": 0.1}, {"r": 32, "alpha": 64, "dropout": 0.1}),
        (
            {"lora_target": "q_proj, v_proj", "lora_rank": 4, "lora_alpha": 4, "additional_target": "lm_head"},
            {"r": 4, "alpha": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ("lm_head",)},
        ),
    ],
)
def test_adapters_become_model_lora(given: dict[str, Any], lora: dict[str, Any]) -> None:
    found = imported(block(model_args={**given, "freeze_module_prefix": "model.embed_tokens"}))
    assert job(found).model.lora == LoraSpec(**lora)
    # ROLL freezes by prefix only if it trains whole weights.
    assert job(found).model.freeze_module_prefix == ()
    assert fates(found)["sft_train.model_args.lora_target"][1] == "model.lora.target_modules"


def test_adapters_need_targets_in_names() -> None:
    pattern = imported(block(model_args={"lora_target": r".*(q|v)_proj$", "lora_rank": 4}))
    assert "model.lora.target_modules" in {row.target for row in pattern.needed}
    without = imported(block(model_args={"lora_rank": 4, "lora_alpha": 8}))
    assert job(without).model.lora is None
    assert fates(without)["sft_train.model_args.lora_rank"] == (Outcome.NOT_NEEDED, None)
    worker = {"strategy_args": {"strategy_name": "fsdp2_infer"}, "model_args": {"lora_target": "all"}}
    found = imported(block(**worker), worker="sft_train")
    assert fates(found)["sft_train.model_args.lora_target"] == (Outcome.NOT_SUPPORTED, None)


def test_public_example_with_adapters_trains_them() -> None:
    name = next(one for one in FILES if "rlvr_lora" in one)
    lora = job(imported(FILES[name])).model.lora
    assert lora is not None
    assert (lora.r, lora.alpha, lora.target_modules) == (32, 32, ("o_proj", "q_proj", "k_proj", "v_proj"))


def test_fields_that_a_job_lacks_are_reported_and_marked() -> None:
    raw = block(
        model_args={"adapter_name_or_path": "/adapters"},
        training_args={"weight_decay": 0.1, "warmup_ratio": 0.1, "lr_scheduler_type": "greedy", "max_steps": 7},
        infer_batch_size=2,
        typo_in_worker=1,
    )
    raw["typo_at_root"] = 3
    found = imported(raw)
    assert marked(found) >= {
        "sft_train.model_args.adapter_name_or_path",
        "sft_train.training_args.lr_scheduler_type",
        "sft_train.typo_in_worker",
        "typo_at_root",
    }
    assert fates(found)["typo_at_root"][0] is Outcome.UNKNOWN
    assert fates(found)["sft_train.training_args.max_steps"][0] is Outcome.NOT_NEEDED
    assert any("norms and biases" in row.reason for row in found.rows)


def test_invalid_value_is_an_error_at_its_line() -> None:
    with pytest.raises(SpecError, match=r"greater than 0.*training.learning_rate") as refused:
        imported(block(training_args={"learning_rate": -1.0}))
    (problem,) = refused.value.problems
    assert (problem.pointer, problem.line is not None) == ("/sft_train/training_args/learning_rate", True)


def test_resolver_is_refused_by_name_only_where_its_value_is_needed() -> None:
    tracked = block()
    tracked["tracker_kwargs"] = {"api_key": "${oc.env:WANDB_API_KEY}"}
    assert fates(imported(tracked))["tracker_kwargs.api_key"][0] is Outcome.NOT_NEEDED
    with pytest.raises(SpecError, match=r"the resolver oc.env is not evaluated; write the value of sft_train"):
        imported(block(training_args={"learning_rate": "${oc.env:LR}"}))
    with pytest.raises(SpecError, match=r"\$\{lr\} refers to no field of the file"):
        imported(block(training_args={"learning_rate": "${lr}"}))
