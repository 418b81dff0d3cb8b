"""Import of Accelerate's configuration files, with FSDP1, FSDP2 and parallelism."""

from typing import Any

import pytest
import yaml

from tests.unit.train_loop.spec.importers.cases import documents, fates, imported, job, marked, mesh_of, unreported
from train_loop.spec import SpecError
from train_loop.spec.importers import Outcome
from train_loop.spec.importers.hugging_face.fsdp import RULES

FILES = documents("accelerate.yaml")
LAUNCH = [
    "fsdp_version",
    "fsdp_offload_params",
    "fsdp_min_num_params",
    "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch",
    "fsdp_state_dict_type",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states",
    "fsdp_activation_checkpointing",
]
"""The options of `accelerate launch` for FSDP, accelerate 1.15."""


def config(processes: int = 8, machines: int = 1, precision: str | bool = "bf16", **options: Any) -> dict[str, Any]:
    return {
        "distributed_type": "FSDP",
        "num_processes": processes,
        "num_machines": machines,
        "mixed_precision": precision,
        "fsdp_config": {f"fsdp_{name}": value for name, value in options.items()},
    }


def parallel(**sizes: int) -> dict[str, Any]:
    return {**config(version=2), "parallelism_config": {f"parallelism_config_{name}": n for name, n in sizes.items()}}


@pytest.mark.parametrize("name", FILES)
def test_every_example_imports_and_reports_every_field(name: str) -> None:
    raw = yaml.safe_load(FILES[name])
    found = imported(FILES[name])
    assert found.formats == ("Accelerate",)
    assert unreported(found, raw) == set()
    assert [row for row in found.rows if row.outcome is Outcome.UNKNOWN] == []
    assert job(found).scaling.world == max(raw.get("num_processes", 1), 1)


def test_every_option_of_the_launcher_is_known() -> None:
    found = imported(config() | {"fsdp_config": dict.fromkeys(LAUNCH, "true")})
    assert {row.field for row in found.rows if row.outcome is Outcome.UNKNOWN} == set()
    assert {name.removeprefix("fsdp_") for name in LAUNCH} - RULES.keys() == {
        "sharding_strategy", "reshard_after_forward", "auto_wrap_policy", "min_num_params",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "reshard", "fsdp_size"),
    [
        ("FULL_SHARD", True, 0),
        (1, True, 0),
        ("SHARD_GRAD_OP", False, 0),
        ("2", False, 0),
        ("HYBRID_SHARD", True, 4),
        ("HYBRID_SHARD_ZERO2", False, 4),
        ("_HYBRID_SHARD_ZERO2", False, 4),
        (4, True, 4),
    ],
)
def test_sharding_strategies_of_fsdp1_become_two_fields(strategy: Any, reshard: bool, fsdp_size: int) -> None:
    spec = job(imported(config(8, 2, sharding_strategy=strategy)))
    assert (spec.strategy.reshard_after_forward, spec.strategy.fsdp_size) == (reshard, fsdp_size)
    assert spec.strategy.sharding_strategy == "FULL_SHARD"


def test_no_shard_shards_nothing() -> None:
    assert job(imported(config(sharding_strategy="NO_SHARD"))).strategy.sharding_strategy == "NO_SHARD"


def test_hybrid_shards_without_the_size_of_a_host_are_those_of_a_node() -> None:
    raw = config(sharding_strategy="HYBRID_SHARD")
    del raw["num_processes"]
    found = imported(raw)
    assert "scaling.num_workers" in {row.target for row in found.needed}
    assert job(found).strategy.fsdp_size == "node"


@pytest.mark.parametrize(("given", "expected"), [(True, True), ("false", False), ("true", True), (2, 2)])
def test_reshard_after_forward_of_fsdp2_is_taken(given: Any, expected: Any) -> None:
    assert job(imported(config(version=2, reshard_after_forward=given))).strategy.reshard_after_forward is expected


def test_wrap_policies_are_classes_or_a_size() -> None:
    classes = job(imported(config(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_layer_cls_to_wrap="A, B")))
    assert classes.strategy.wrap_policy.transformer_layer_cls_to_wrap == ("A", "B")
    size = job(imported(config(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=100_000_000)))
    assert size.strategy.wrap_policy.min_num_params == 100_000_000
    both = imported(config(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=5, transformer_layer_cls_to_wrap="A"))
    assert job(both).strategy.wrap_policy.transformer_layer_cls_to_wrap == ()
    assert fates(both)["fsdp_config.fsdp_transformer_layer_cls_to_wrap"][0] is Outcome.NOT_NEEDED
    ignored = imported(config(min_num_params=7))
    assert job(ignored).strategy.wrap_policy.min_num_params is None
    assert fates(ignored)["fsdp_config.fsdp_min_num_params"][0] is Outcome.NOT_NEEDED
    none = imported(config(auto_wrap_policy="NO_WRAP"))
    assert fates(none)["fsdp_config.fsdp_auto_wrap_policy"][0] is Outcome.NOT_SUPPORTED


def test_offload_and_activation_checkpointing_are_taken() -> None:
    spec = job(imported(config(offload_params=True, activation_checkpointing="true")))
    assert (spec.strategy.offload_policy, spec.model.gradient_checkpointing) == (True, "full")
    assert job(imported(config(activation_checkpointing=False))).model.gradient_checkpointing == "none"


@pytest.mark.parametrize(
    ("given", "dtype", "reduce"),
    [("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), (False, "fp32", "fp32"), ("no", "fp32", "fp32")],
)
def test_mixed_precision_also_reduces_in_the_dtype(given: str | bool, dtype: str, reduce: str) -> None:
    found = imported(config(precision=given))
    assert (job(found).model.dtype, job(found).strategy.reduce_dtype) == (dtype, reduce)
    assert ("mixed_precision" in marked(found)) == (dtype != "fp32")


def test_axes_of_parallelism_config_are_those_of_the_mesh() -> None:
    spec = job(imported(parallel(dp_replicate_size=2, dp_shard_size=2, tp_size=2, cp_size=1)))
    mesh = mesh_of(spec)
    assert (mesh.ddp, mesh.fsdp, mesh.tp) == (2, 2, 2)
    context = job(imported(parallel(dp_shard_size=2, cp_size=4)))
    assert (context.strategy.ulysses_size, context.strategy.fsdp_size, context.scaling.world) == (4, 0, 8)
    sequence = job(imported(parallel(dp_replicate_size=2, dp_shard_size=2, sp_size=2)))
    assert (sequence.strategy.ulysses_size, sequence.strategy.fsdp_size, sequence.scaling.world) == (2, 4, 8)


def test_file_without_a_learning_rate_names_what_to_replace() -> None:
    found = imported(config())
    assert {row.target for row in found.needed} == {"model.path", "data.train.path", "training.learning_rate"}


def test_later_file_wins_and_its_report_has_no_stale_rows() -> None:
    found = imported(config(), {"learning_rate": 1e-5, "do_train": True, "max_steps": 10, "bf16": True})
    spec = job(found)
    assert found.formats == ("Accelerate", "TrainingArguments")
    assert (spec.training.learning_rate, spec.training.max_steps, spec.scaling.world) == (1e-5, 10, 8)
    assert spec.training.num_train_epochs is None
    assert {row.target for row in found.needed} == {"model.path", "data.train.path"}


def test_unknown_and_unsupported_fields_are_marked() -> None:
    raw = config(typo=1) | {"typo": 2, "fp8_config": {"backend": "TE"}, "distributed_type": "DEEPSPEED"}
    found = imported(raw)
    assert marked(found) >= {"fsdp_config.fsdp_typo", "typo", "fp8_config.backend"}
    assert fates(found)["distributed_type"][0] is Outcome.NOT_SUPPORTED


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("just text", "not a mapping of fields"),
        ("a: 1", "unknown format; expected a file of ROLL, Accelerate, TrainingArguments"),
        ("{}", "unknown format; expected a file of ROLL, Accelerate, TrainingArguments"),
        (
            "name: mine\nmodel: {path: /models/a}",
            "a configuration of Trainshed .*needs no import; submit it: trainshed submit",
        ),
        ("distributed_type: FSDP\nx: &a [1]\ny: *b", r"\*b refers to no anchor"),
        ("distributed_type: FSDP\ndistributed_type: NO", "given twice"),
        ("mixed_precision: fp12\nmachine_rank: 0", r"fp12.*\(model.dtype of the spec\)"),
        ("distributed_type: " + "[" * 40, "levels deep"),
    ],
)
def test_bad_file_is_an_error(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        imported(text)


def test_batch_and_clipping_of_deepspeed_and_megatron_are_taken() -> None:
    raw = config() | {"deepspeed_config": {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "zero_stage": 3}}
    training = job(imported(raw)).training
    assert (training.gradient_accumulation_steps, training.max_grad_norm) == (4, 0.5)
    other = {"megatron_lm_num_micro_batches": 2, "megatron_lm_gradient_clipping": "auto"}
    found = imported(config() | {"megatron_lm_config": other})
    assert (job(found).training.gradient_accumulation_steps, job(found).training.max_grad_norm) == (2, 1.0)


def test_unknown_field_is_reported_with_the_field_of_a_spec_that_has_its_meaning() -> None:
    (row,) = [row for row in imported(config() | {"seq_len": 512}).rows if row.field == "seq_len"]
    assert row.outcome is Outcome.UNKNOWN
    assert row.reason == ("not a known field of Accelerate; it has no effect; in a spec, it is data.sequence_length")


def test_worker_of_a_file_without_workers_is_an_error() -> None:
    with pytest.raises(SpecError, match="has no workers of ROLL; remove --worker"):
        imported(config(), worker="actor_train")
