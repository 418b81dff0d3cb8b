"""Forecasts of throughput against published and measured steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.specs import TINY, code_spec, raw_spec
from train_loop.plan import ModelShape, Plan, device_named, outlook_on, plan_job, read_shape, throughput_on
from train_loop.plan.forecast.work import Range, exchanges, matrix_flops, restoring_bytes
from train_loop.spec import JobSpec, parse

DATA = json.loads(Path("tests/fixtures/published_steps.json").read_text())
MODELS: dict[str, dict[str, Any]] = DATA["models"]
WIDEST = {False: 4.5, True: 12.0}
"""Largest ratio of an interval's ends, by whether rows are packed: the lengths of documents are unknown."""


def planned(**step: Any) -> tuple[JobSpec, Plan]:
    """Return spec and plan of a step with the fields of the table."""
    config = MODELS[step["model"]]
    rows, gpus, times = step["rows"], step["gpus"], step.get("accumulation", 1)
    adapters = {"lora": {"r": step["lora"]}, "quantize_base": step.get("quantize_base")} if "lora" in step else {}
    job = parse(
        raw_spec(
            model={
                "config": config,
                "dtype": "bf16",
                "master_dtype": step.get("master", "fp32"),
                "gradient_checkpointing": step["recompute"],
                "compile": step.get("compile", False),
                "attn_implementation": step.get("attention", "auto"),
            }
            | adapters,
            data={"sequence_length": step["length"], "packing": step.get("packing", False)},
            training={"per_device_train_batch_size": rows, "gradient_accumulation_steps": times},
            strategy={"offload_policy": step.get("offload", False)} | step.get("strategy", {}),
            scaling={"num_workers": gpus, "resources_per_worker": {"CPU": 12.0, "GPU": 1.0}},
        )
    )
    return job, plan_job(job, read_shape(config).adapted(job.model))


def interval(step: dict[str, Any]) -> Range:
    """Return the forecast in tokens per second and GPU."""
    speed = throughput_on(*planned(**step), device_named(step["device"]))
    assert speed is not None
    return speed.tokens_per_second.times(1 / step["gpus"])


def name(step: dict[str, Any]) -> str:
    return f"{step['source'].split(',')[0]}-{step['model']}-{step['device']}x{step['gpus']}-{step['length']}"


@pytest.mark.parametrize("step", DATA["steps"], ids=name)
def test_measured_step_is_inside_the_interval(step: dict[str, Any]) -> None:
    found = interval(step)
    assert found.least <= step["tokens"] <= found.most, found
    assert found.most / found.least < WIDEST[step.get("packing", False)], "an interval that says nothing"


def test_intervals_are_not_all_on_one_side_of_the_measurements() -> None:
    places = []
    for step in DATA["steps"]:
        found = interval(step)
        places.append((step["tokens"] - found.least) / (found.most - found.least))
    middle = sorted(places)[len(places) // 2]
    assert 0.2 < middle < 0.8, places


@pytest.mark.parametrize("more", [{}, {"compile": True, "packing": True, "strategy": {"ulysses_size": 2}}])
def test_time_of_a_step_grows_with_what_backward_repeats(more: dict[str, Any]) -> None:
    kinds = ("none", {"every": 4}, "selective", {"every": 2}, "full")
    step = {"model": "llama-3-8b", "gpus": 8, "length": 8192, "rows": 1, "strategy": {}} | more
    found = [throughput_on(*planned(**step | {"recompute": how}), device_named("h100-80g")) for how in kinds]
    least = [one.tokens_per_second.least for one in found if one is not None]
    assert len(least) == len(kinds)
    assert least == sorted(least, reverse=True)
    assert least[0] < 1.4 * least[-1]


def test_budget_is_between_a_plain_step_and_full_recomputation() -> None:
    step = {"model": "llama-3-8b", "gpus": 8, "length": 8192, "rows": 1, "compile": True}
    jobs = [planned(**step | {"recompute": how}) for how in ("none", {"budget": 0.5}, "full")]
    found = [throughput_on(*job, device_named("h100-80g")) for job in jobs]
    least = [one.tokens_per_second.least for one in found if one is not None]
    assert least[0] > least[1] > least[2]
    assert found[1] is not None
    assert "torch.compile repeats 50% of each layer's forward pass" in found[1].assumptions
    sizes = [plan.memory_bytes for _, plan in jobs]
    assert sizes[0] > sizes[1] > sizes[2]


EIGHT_B = {"model": "llama-3-8b", "gpus": 1, "length": 4096, "rows": 2, "recompute": "none", "master": "bf16"}


def test_step_of_adapters_has_no_gradients_of_frozen_weights() -> None:
    """4 FLOPs for a frozen weight and token, outputs and gradients of inputs, and 6 for a weight of adapters."""
    job, plan = planned(**EIGHT_B, lora=16)
    tokens, adapters = 2 * 4096, plan.shape.trained
    frozen = plan.shape.parameters - adapters - plan.shape.vocab * plan.shape.hidden
    assert matrix_flops(job, plan) == pytest.approx(tokens * (4 * frozen + 6 * adapters), rel=1e-3)
    full = matrix_flops(*planned(**EIGHT_B))
    assert full == pytest.approx(tokens * 6 * frozen, rel=1e-3)


def test_quantised_weights_are_restored_in_each_pass() -> None:
    device, found = device_named("h200"), {}
    for kind in (None, "int8", "nf4"):
        job, plan = planned(**EIGHT_B, lora=16, quantize_base=kind)
        found[kind] = throughput_on(job, plan, device)
        if kind is not None:
            assert plan.shape.quantized is not None
            # Forward and backward; with recomputation once more.
            moved = restoring_bytes(job, plan)
            assert moved.most == 2 * {"nf4": 31, "int8": 11}[kind] * plan.shape.quantized.values
            again = restoring_bytes(*planned(**EIGHT_B | {"recompute": "full"}, lora=16, quantize_base=kind))
            assert again.most == pytest.approx(1.5 * moved.most)
    slowest = [one.step_seconds.most for one in found.values() if one is not None]
    assert slowest == sorted(slowest)
    assert found["nf4"] is not None
    assert "no measured run of quantised weights has been compared" in " ".join(found["nf4"].assumptions)
    # FSDP2 gathers codes.
    sent = [exchanges(*planned(**EIGHT_B | {"gpus": 2}, lora=16, quantize_base=kind))[0].size for kind in (None, "nf4")]
    assert sent[1] < 0.4 * sent[0]


@pytest.mark.parametrize(("chosen", "gathers_less"), [("tensorwise", True), ("rowwise", False)])
def test_float8_shortens_products_and_rounds_operands(chosen: str, gathers_less: bool) -> None:
    step, found = {"model": "llama-3-8b", "gpus": 8, "length": 8192, "rows": 2, "recompute": "none"}, []
    for float8 in (None, chosen):
        job, plan = planned(**step, strategy={"float8": float8})
        speed = throughput_on(job, plan, device_named("h100-80g"))
        assert speed is not None
        found.append({part.name: part.seconds for part in speed.parts})
    plain, small = found
    head = plan.shape.vocab * plan.shape.hidden
    inside = (plan.shape.parameters - 2 * head) / (plan.shape.parameters - head)
    assert small["matrix_products"].least / plain["matrix_products"].least == pytest.approx(1 - inside / 2, rel=1e-3)
    assert small["memory_traffic"].least > plain["memory_traffic"].least
    assert (small["exchange_of_parameters"].most < plain["exchange_of_parameters"].most) is gathers_less
    reason = outlook_on(job, plan, device_named("a100-80g")).no_throughput
    assert reason == "throughput is not estimated: A100 80GB SXM has no kernels in float8; remove float8"


LLAMA = {"model": "llama-2-70b", "gpus": 8, "length": 4096, "rows": 1, "recompute": "full"}


def test_llama_2_70b_fits_eight_a100_offloaded_at_the_speed_that_is_told() -> None:
    """PyTorch's FSDP is said to train it at 800 to 900 tokens/s on them with FULL_SHARD and bf16."""
    device = device_named("a100-80g")
    job, plan = planned(**LLAMA)
    assert (job.strategy.sharding_strategy, job.strategy.param_dtype) == ("FULL_SHARD", "bf16")
    outlook = outlook_on(job, plan, device, suggests=True)
    assert outlook.fit.verdict == "does_not_fit"
    assert outlook.suggestions is not None
    first = outlook.suggestions[0]
    assert str(first) == "strategy.offload_policy: true"
    assert (first.fit.verdict, first.workers, first.changes_results) == ("fits", 8, False)
    assert first.throughput is not None
    found = first.throughput.tokens_per_second
    assert found.least <= 800 < 900 <= found.most, found


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"training": {"optimizer": "muon"}}, "muon's orthogonal updates"),
        ({"data": {"packing": False}, "model": {"config": TINY, "head": "masked_lm"}}, "of an encoder"),
        ({"training": {"deterministic": True}}, "deterministic algorithms"),
        ({"strategy": {"precision": {"lm_head": "fp32"}}}, "modules with another dtype"),
        ({"strategy": {"matmul_precision": "high"}}, "fp32 products in TF32"),
        ({"scaling": {"num_workers": 16}}, "the network between hosts of 8 A40 is unknown"),
    ],
)
def test_no_forecast_without_grounds(parts: dict[str, dict[str, Any]], reason: str) -> None:
    job = parse(raw_spec(**parts))
    outlook = outlook_on(job, plan_job(job, read_shape(TINY)), device_named("a40"))
    assert outlook.throughput is None
    assert outlook.no_throughput is not None
    assert reason in outlook.no_throughput


def test_no_forecast_of_own_code() -> None:
    job = parse(code_spec())
    outlook = outlook_on(job, plan_job(job, ModelShape.of_code()), device_named("h200"))
    assert "own code" in str(outlook.no_throughput)


def test_no_forecast_in_a_dtype_without_kernels() -> None:
    job, plan = planned(**LLAMA)
    reason = outlook_on(job, plan, device_named("t4")).no_throughput
    assert reason == "throughput is not estimated: T4 has no kernels in bf16; choose fp16 or fp32"


def test_parts_add_up_to_the_slow_end() -> None:
    speed = throughput_on(*planned(**LLAMA, accumulation=3), device_named("a100-80g"))
    assert speed is not None
    parts = {part.name: part.seconds for part in speed.parts}
    slow = sum(seconds.most for name, seconds in parts.items() if name != "kernel_starts")
    assert slow == pytest.approx(speed.step_seconds.most)
    assert speed.tokens_per_second.most == pytest.approx(3 * 8 * 4096 / speed.step_seconds.least)


@pytest.mark.parametrize(
    ("change", "faster"),
    [
        ({"recompute": "none"}, True),
        ({"compile": True}, True),
        ({"offload": True}, False),
        ({"offload": "optimizer"}, False),
        ({"accumulation": 4, "strategy": {"gradient_sync": "last"}}, True),
        ({"length": 16384}, False),
    ],
)
def test_changes_move_the_forecast_as_they_move_steps(change: dict[str, Any], faster: bool) -> None:
    device = device_named("a100-80g")
    before, after = (throughput_on(*planned(**one), device) for one in (LLAMA, LLAMA | change))
    assert before is not None
    assert after is not None
    assert (after.typical > before.typical) is faster


def test_pinned_memory_speeds_offloading() -> None:
    device = device_named("a100-80g")
    steps = [LLAMA | {"offload": True, "strategy": {"pin_memory": pinned}} for pinned in (True, False)]
    pinned, paged = (throughput_on(*planned(**step), device) for step in steps)
    assert pinned is not None
    assert paged is not None
    assert pinned.tokens_per_second.least > 1.2 * paged.tokens_per_second.least


def test_exchanges_across_hosts_slow_the_step() -> None:
    device = device_named("h100-80g")
    step = {"model": "llama-3-8b", "length": 2048, "rows": 1, "recompute": "full"}
    one, two = (throughput_on(*planned(**step, gpus=gpus), device) for gpus in (8, 16))
    assert one is not None
    assert two is not None
    exchanges = [next(p.seconds for p in s.parts if p.name == "exchange_of_parameters") for s in (one, two)]
    assert exchanges[1].most > exchanges[0].most
