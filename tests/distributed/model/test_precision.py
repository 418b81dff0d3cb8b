"""Dtypes of computation, reduction, masters, norms and modules; runs stay consistent after overflows in fp16."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, build, divisor, my_share, one_step, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop import train
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import local_stream
from train_loop.loop.batch import micro_batches
from train_loop.loop.build import Run, build_run
from train_loop.loop.objectives.token_cross_entropy import LossRule, chunked_sum
from train_loop.loop.session import Session
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec

STEPS, FACTOR = 10, 2.0**25
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {"model": {"dtype": "fp32"}},
    "bf16": {"model": {"dtype": "bf16"}},
    "reduced in bf16": {"model": {"dtype": "bf16"}, "strategy": {"reduce_dtype": "bf16"}},
    "bf16 master": {"model": {"dtype": "bf16", "master_dtype": "bf16"}},
    "fp32 norms": {"model": {"dtype": "bf16"}, "strategy": {"norm_dtype": "fp32"}},
    "fp32 output": {"model": {"dtype": "bf16"}, "strategy": {"output_dtype": "fp32"}},
    "bf16 output": {"model": {"dtype": "fp32"}, "strategy": {"output_dtype": "bf16"}},
    "bf16 output of chunks": {
        "model": {"dtype": "fp32"},
        "strategy": {"output_dtype": "bf16"},
        "training": {"chunked_loss": True},
    },
    "uncast inputs": {"model": {"dtype": "bf16"}, "strategy": {"cast_forward_inputs": False}},
    "fp16": {"model": {"dtype": "fp16"}},
}


def train_one(folder: Path, name: str, parts: dict[str, Any]) -> None:
    job = spec(
        model={"config": TINY, "gradient_checkpointing": "none"} | parts["model"],
        data={"train": {"path": str(folder / "d.parquet")}, "columns": {"input_ids": "ids"}, "packing": False},
        training={"max_steps": STEPS, "global_batch_size": 4, "per_device_train_batch_size": 2, "warmup_steps": 2}
        | parts.get("training", {}),
        strategy=parts.get("strategy", {}),
        checkpoint={"every_steps": 5, "keep_last": 2},
        scaling={"num_workers": dist.get_world_size()},
    )
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder / name), local_stream)
    train.train(job, session, find_dataset(job, folder))


def with_a_large_factor(*arguments: Any) -> Run:
    """Train a run whose scaler starts so high that its first steps overflow."""
    run = build_run(*arguments)
    run.state.scaler = GradScaler("cpu", init_scale=FACTOR)
    return run


def all_runs(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, parts in RUNS.items():
            if name == "fp16":
                patch.setattr(train, "build_run", with_a_large_factor)
            train_one(folder, name, parts)
        if dist.get_rank() == 0:
            shutil.copytree(folder / "fp16", folder / "resumed")
            shutil.rmtree(RunDir(folder / "resumed").checkpoint(STEPS))
        dist.barrier()
        train_one(folder, "resumed", RUNS["fp16"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=40, length=32, vocab=TINY["vocab_size"])
    on_ranks(2, all_runs, folder)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder).attempt(1).metrics))


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("fp32", "fp16")])
def test_every_precision_trains_near_fp32_but_not_identically(runs: Path, name: str) -> None:
    exact, found = lines(runs / "fp32"), lines(runs / name)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in exact], rel=0.02)
    assert [line["loss"] for line in found] != [line["loss"] for line in exact]


def test_output_dtype_rounds_the_logits_of_chunks_too() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(8, 16, generator=draw, requires_grad=True), torch.randn(50, 16, generator=draw)
    labels, rule = torch.arange(8), LossRule(output_dtype=torch.bfloat16)
    expected = rule.sum(hidden @ weight.T, labels).item()
    rounded, exact = (chunked_sum(one, hidden, weight, None, labels, rows=3).item() for one in (rule, LossRule()))
    assert rounded == pytest.approx(expected, rel=1e-6)
    assert exact != pytest.approx(expected, rel=1e-5)


def test_inputs_that_are_not_cast_have_the_compute_dtype_already(runs: Path) -> None:
    # All inputs of units are the outputs of others, but FSDP2 casts none of them.
    assert [line["loss"] for line in lines(runs / "uncast inputs")] == [line["loss"] for line in lines(runs / "bf16")]


def test_master_weights_have_the_master_dtype(runs: Path) -> None:
    for name, dtype in {"bf16": torch.float32, "bf16 master": torch.bfloat16}.items():
        assert {weight.dtype for weight in load_checkpoint(runs / name, STEPS)["model"].values()} == {dtype}


def test_overflowing_steps_leave_schedule_weights_and_counters_consistent(runs: Path) -> None:
    found, exact = lines(runs / "fp16"), lines(runs / "fp32")
    scales = [line["loss_scale"] for line in found]
    before = [FACTOR, *scales[:-1]]
    skips = [now < then for then, now in zip(before, scales, strict=True)]
    skipped = sum(skips)
    assert 0 < skipped < STEPS - 3, "expected overflows in some steps only"
    # Each skipped step halves the factor; steps, tokens and samples are counted, the schedule waits.
    assert scales == [then / 2 if skip else then for then, skip in zip(before, skips, strict=True)]
    assert [line["tokens"] for line in found] == [line["tokens"] for line in exact]
    trained = [step - sum(skips[:step]) for step in range(STEPS)]
    assert [line["lr"] for line in found] == [exact[number]["lr"] for number in trained]
    assert found[skips.index(False)]["loss"] == pytest.approx(exact[0]["loss"], rel=0.01), (
        "expected unchanged weights in skipped steps"
    )
    lowered = [e for e in read_lines(RunDir(runs / "fp16").attempt(1).events) if e["event"] == "loss_scale_lowered"]
    assert len(lowered) == skipped


def test_scaler_factor_survives_a_restart(runs: Path) -> None:
    whole, resumed = lines(runs / "fp16")[5:], lines(runs / "resumed")[STEPS:]
    for name in ("step", "loss", "lr", "loss_scale"):
        assert [line[name] for line in resumed] == [line[name] for line in whole]


def dtypes_inside() -> dict[str, set[str]]:
    """Return the dtypes of weights and logits during a forward pass."""
    found = dict[str, set[str]]()

    def note(module: nn.Module, _: Any) -> None:
        found.setdefault(type(module).__name__, set()).add(str(module.weight.dtype))

    job = spec(
        model={"config": TINY, "dtype": "bf16", "gradient_checkpointing": "none"},
        strategy={"norm_dtype": "fp32", "output_dtype": "fp32"},
        scaling={"num_workers": 2},
    )
    model, loss, mesh = build(job)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) and getattr(module, "weight", None) is not None:
            module.register_forward_pre_hook(note)
    batch = my_share(random_rows(2, 32, vocab=TINY["vocab_size"], packed=False), mesh)
    (micro,) = micro_batches(batch, 1, loss.anatomy, mesh)
    out = model(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **micro.attention)
    return found | {"logits": {str(out.logits.dtype)}}


def test_norms_keep_fp32_on_request_and_matrices_compute_in_bf16() -> None:
    found = {name.removeprefix("FSDP"): dtypes for name, dtypes in on_ranks(2, dtypes_inside)[0].items()}
    assert found == {"Qwen3RMSNorm": {"torch.float32"}, "Linear": {"torch.bfloat16"}, "logits": {"torch.float32"}}


LENGTH = 32
Result = tuple[float, Gradients]
ALL = dict.fromkeys(("model.layers.*", "model.embed_tokens", "model.norm", "lm_head"), "bf16")
MIXED = {"model.layers.0": "fp32", "lm_head": "fp32"}
FINER = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer", "Qwen3MLP"], "wrap_embeddings": True}
VARIANTS: dict[str, tuple[dict[str, Any], bool]] = {
    "layers": ({}, False),
    "tied, shared sequences": ({"ulysses_size": 2}, True),
    "finer units": ({"wrap_policy": FINER}, False),
    "fp32 norms, kept": ({"norm_dtype": "fp32", "reshard_after_forward": False}, False),
}
"""Other settings, and whether embeddings and head are tied."""


def job_of(dtype: str, precision: dict[str, str], strategy: dict[str, Any], *, tied: bool) -> JobSpec:
    return spec(
        model={"config": TINY | {"tie_word_embeddings": tied}, "dtype": dtype, "gradient_checkpointing": "full"},
        data={"sequence_length": LENGTH},
        training={"per_device_train_batch_size": 2, "chunked_loss": False},
        strategy=strategy | {"precision": precision},
        scaling={"num_workers": dist.get_world_size()},
    )


def both_ways() -> dict[str, tuple[Result, Result]]:
    """Return the results of bf16 as the compute dtype, and as the dtype of each part of an fp32 model."""
    rows, found = random_rows(8, LENGTH, vocab=TINY["vocab_size"], packed=True), {}
    for name, (strategy, tied) in VARIANTS.items():
        whole = one_step(job_of("bf16", {}, strategy, tied=tied), rows)
        # A norm that a pattern names would ignore norm_dtype.
        parts = {part: dtype for part, dtype in ALL.items() if "norm_dtype" not in strategy or part != "model.norm"}
        found[name] = whole, one_step(job_of("fp32", parts, strategy, tied=tied), rows)
    return found


@pytest.fixture(scope="module")
def by_parts() -> dict[str, tuple[Result, Result]]:
    results: dict[str, tuple[Result, Result]] = on_ranks(2, both_ways)[0]
    return results


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_of_a_dtype_compute_as_a_model_of_it(by_parts: Any, name: str) -> None:
    (expected_loss, expected), (loss, gradients) = by_parts[name]
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    # The last norm is in the root, whose dtype is that of its input: it rounds in another place.
    others = {"model.norm.weight"} if "fp32 norms" in name else set()
    assert [n for n in expected.keys() - others if not torch.equal(gradients[n], expected[n])] == []


def casting(dtype: torch.dtype) -> Any:
    def hook(_: nn.Module, inputs: Any, named: Any) -> Any:
        def one(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(one, value))
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return one(inputs), {name: one(value) for name, value in named.items()}

    return hook


def mixed_and_plain() -> tuple[Result, Result, float]:
    """Return the results of a model with a layer and a head in fp32 as sharded, and as a plain module with casts."""
    spec_of_run = job_of("bf16", MIXED, {}, tied=False)
    rows = random_rows(2, LENGTH, vocab=TINY["vocab_size"], packed=False)
    model, loss, mesh = build(spec_of_run)
    weights = {name: whole(one.detach()) for name, one in model.named_parameters()}
    batch = my_share(rows, mesh)
    count = divisor(batch, mesh)
    (micro,) = micro_batches(batch, 2, loss.anatomy, mesh)
    mean = accumulate_plainly(loss, [micro], count, mesh).item()
    sharded = mean, {name: whole(one.grad) for name, one in model.named_parameters()}
    plain = AutoModelForCausalLM.from_config(Qwen3Config(**TINY), attn_implementation="sdpa")
    frequencies = plain.model.rotary_emb.inv_freq
    plain.to(torch.bfloat16).model.rotary_emb.inv_freq = frequencies
    first, head = plain.model.layers[0].float(), plain.lm_head.float()
    plain.load_state_dict(weights)
    for module in (first, head):
        module.register_forward_pre_hook(casting(torch.float32), with_kwargs=True)
    first.register_forward_hook(lambda _, __, output: output.to(torch.bfloat16))
    logits = plain(
        input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **micro.attention
    ).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum") / count
    torch.autograd.backward(total)
    expected = {name: one.grad.float() for name, one in plain.named_parameters()}
    return sharded, (total.item(), expected), float(logits.dtype == torch.float32)


def test_layer_and_head_in_fp32_compute_as_a_plain_module_with_casts() -> None:
    (loss, gradients), (expected_loss, expected), is_fp32 = on_ranks(1, mixed_and_plain)[0]
    assert is_fp32
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected.items():
        assert (gradients[name] - value).norm() <= 1e-6 * value.norm(), name


def mixed() -> Result:
    return one_step(
        job_of("bf16", MIXED, {}, tied=False), random_rows(8, LENGTH, vocab=TINY["vocab_size"], packed=True)
    )


def test_ranks_compute_layers_of_other_dtypes_as_one_rank_does() -> None:
    (one, expected), (loss, gradients) = on_ranks(1, mixed)[0], on_ranks(2, mixed)[0]
    assert loss == pytest.approx(one, rel=1e-4)
    for name, value in expected.items():
        # Most of the difference is the rounding of sums over rows in bf16.
        assert (gradients[name] - value).norm() <= 0.02 * value.norm(), name
