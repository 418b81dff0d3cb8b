"""Linear layers in float8, emulated: ranks compute what torchao's plain modules do, and runs keep their guarantees."""

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import build, divisor, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop.checkpoint.export.full import gather
from train_loop.checkpoint.export.huggingface import export
from train_loop.conformance.measure import accumulate_plainly, whole
from train_loop.data.stream.local import local_stream
from train_loop.loop.batch import micro_batches
from train_loop.loop.session import Session
from train_loop.model.float8 import forget_scales, update_scales
from train_loop.model.parts import memory_of
from train_loop.run import run
from train_loop.run_dir import ExportWish, RunDir, read_lines
from train_loop.spec import JobSpec

pytest.importorskip("torchao", reason="torchao is an optional dependency, which is not installed here")
LENGTH, STEPS, SAVED = 32, 8, 4
Result = tuple[float, dict[str, Tensor]]
WITHOUT: dict[str, Any] = {"float8": None}
ODD = {"intermediate_size": 40}
"""A size that is no multiple of 16."""
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tensorwise": (2, {"strategy": {"float8": "tensorwise"}}, {}),
    "rowwise": (2, {"strategy": {"float8": "rowwise"}}, {}),
    "odd size, recomputed": (
        2,
        {"strategy": {"float8": "tensorwise"}, "model": {"gradient_checkpointing": {"every": 2}}},
        ODD,
    ),
    "compiled": (2, {"strategy": {"float8": "tensorwise"}, "model": {"compile": True}}, {}),
    "unequal shards": (3, {"strategy": {"float8": "tensorwise"}}, {}),
    "replicas, kept": (
        4,
        {"strategy": {"float8": "tensorwise", "fsdp_size": 2, "reshard_after_forward": False}},
        {},
    ),
}
"""Ranks, settings and sizes."""


def job_of(parts: dict[str, Any], config: dict[str, Any]) -> JobSpec:
    return spec(
        model={"config": TINY | config, "dtype": "fp32", "gradient_checkpointing": "none"} | parts.get("model", {}),
        data={"sequence_length": LENGTH},
        training={"per_device_train_batch_size": 2, "chunked_loss": False},
        strategy=parts["strategy"],
        scaling={"num_workers": dist.get_world_size()},
    )


def sharded_and_plain(parts: dict[str, Any], sizes: dict[str, Any]) -> tuple[Result, Result, bool]:
    """Return loss and gradients of a sharded model, and of torchao's plain modules; and whether scales are the same.

    The plain model computes each rank's rows by itself, in the rank's process, and the sums are added.
    """
    job = job_of(parts, sizes)
    model, loss, mesh = build(job)
    weights = {name: whole(memory_of(one).detach()) for name, one in model.named_parameters()}
    batch = my_share(random_rows(2 * mesh.plan.dp, LENGTH, vocab=TINY["vocab_size"], packed=False), mesh)
    count = divisor(batch, mesh)
    (micro,) = micro_batches(batch, 2, loss.anatomy, mesh)
    mean = accumulate_plainly(loss, [micro], count, mesh).item()
    sharded = mean, {name: whole(one.grad) for name, one in model.named_parameters()}

    plain = AutoModelForCausalLM.from_config(Qwen3Config(**TINY | sizes), attn_implementation="sdpa")
    plain.load_state_dict(weights)
    library = importlib.import_module("torchao.float8")
    config = library.Float8LinearConfig.from_recipe_name(job.strategy.float8)
    object.__setattr__(config, "emulate", True)
    library.convert_to_float8_training(
        plain.model.layers,
        config=config,
        module_filter_fn=lambda one, _: one.in_features % 16 == 0 and one.out_features % 16 == 0,
    )
    logits = plain(input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="sum") / count
    torch.autograd.backward(total)
    found = total.detach().clone(), {name: one.grad for name, one in plain.named_parameters()}
    for one in (found[0], *found[1].values()):
        dist.all_reduce(one)
    return sharded, (found[0].item(), found[1]), same_scales(loss, micro)


def same_scales(loss: Any, micro: Any) -> bool:
    """Return whether a pass gives the same bits with scales that are computed at once, and by each gather."""
    model, values = loss.anatomy.model, []
    with torch.no_grad():
        for prepare in (update_scales, lambda model: forget_scales(model.parameters())):
            prepare(model)
            values.append(loss(micro).total)
    return torch.equal(*values)


def results_of(names: list[str]) -> dict[str, Any]:
    return {name: sharded_and_plain(*CASES[name][1:]) for name in names}


@pytest.fixture(scope="module")
def results() -> dict[str, list[tuple[Result, Result, bool]]]:
    found = dict[str, list[tuple[Result, Result, bool]]]()
    for world in sorted({ranks for ranks, _, _ in CASES.values()}):
        names = [name for name, (ranks, _, _) in CASES.items() if ranks == world]
        ranks = on_ranks(world, results_of, names)
        found |= {name: [of[name] for of in ranks] for name in names}
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_as_plain_modules_of_torchao_do(results: Any, name: str) -> None:
    # A compiled graph may differ in the last bit, and a value then rounds to the next number of float8.
    bound = 1e-3 if name == "compiled" else 1e-5
    for (loss, gradients), (expected_loss, expected), same in results[name]:
        assert same
        assert loss == pytest.approx(expected_loss, rel=bound)
        assert gradients.keys() == expected.keys()
        for parameter, value in expected.items():
            assert (gradients[parameter] - value).norm() <= bound * value.norm(), parameter


RUNS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"strategy": {"float8": "tensorwise"}},
    "rowwise": {"strategy": {"float8": "rowwise"}},
    "averaged, in groups": {
        "strategy": {"float8": "tensorwise"},
        "training": {
            "ema_decay": 0.9,
            "optimizer": "adam",
            "layer_decay": 0.9,
            "groups": [{"params": ["*.mlp.*"], "lr_scale": 0.5}],
        },
    },
    "sgd, shared sequences": {
        "strategy": {"float8": "tensorwise", "ulysses_size": 2},
        "training": {"optimizer": "sgd", "learning_rate": 0.1},
    },
}


def run_of(folder: Path, parts: dict[str, Any]) -> JobSpec:
    return spec(
        model={"config": TINY, "dtype": "bf16"},
        data={
            "train": {"path": str(folder / "d.parquet")},
            "eval": {"path": str(folder / "d.parquet")},
            "columns": {"input_ids": "ids"},
            "packing": False,
        },
        training={"max_steps": STEPS, "global_batch_size": 4, "per_device_train_batch_size": 2, "eval_steps": 2}
        | parts.get("training", {}),
        strategy=parts.get("strategy", {}),
        checkpoint={"every_steps": SAVED, "keep_last": 2},
        scaling={"num_workers": 2},
    )


def train_one(folder: Path, name: str, parts: dict[str, Any]) -> None:
    job, run_dir = run_of(folder, parts), RunDir(folder / name)
    if dist.get_rank() == 0:
        run_dir.write_spec(job)
    dist.barrier()
    session = Session(dist.get_rank(), dist.get_world_size(), 0, 1, run_dir, local_stream)
    run(job, session, folder / "no cache")


def all_runs(folder: Path) -> None:
    """Train each run; then again from the middle, and from there on without float8, in the same run directory."""
    for name, parts in RUNS.items():
        train_one(folder, name, parts)
        if name == "bf16":
            continue
        for resumed, changed in {"again": parts, "without": parts | {"strategy": WITHOUT}}.items():
            if resumed == "without" and "training" in parts:
                continue
            if dist.get_rank() == 0:
                shutil.copytree(folder / name, folder / f"{name}, {resumed}")
                shutil.rmtree(RunDir(folder / f"{name}, {resumed}").checkpoint(STEPS))
            dist.barrier()
            train_one(folder, f"{name}, {resumed}", changed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torchao.float8", None)
        whole = gather(RunDir(folder / "tensorwise"), STEPS, "dtensor", optimizer=False)
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder / "d.parquet", rows=24, length=LENGTH, vocab=TINY["vocab_size"])
    on_ranks(2, all_runs, folder)
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(RunDir(folder).attempt(1).metrics))


@pytest.mark.parametrize("name", [name for name in RUNS if name in ("tensorwise", "rowwise")])
def test_losses_in_float8_are_near_those_without_it_and_differ(runs: Path, name: str) -> None:
    exact, found = ([line["loss"] for line in lines(runs / of)] for of in ("bf16", name))
    assert found == pytest.approx(exact, rel=0.01)
    assert found != exact


@pytest.mark.parametrize("name", [name for name in RUNS if name != "bf16"])
def test_resumed_run_has_the_bits_of_the_uninterrupted_one(runs: Path, name: str) -> None:
    whole, again = (load_tensors(runs / of, STEPS) for of in (name, f"{name}, again"))
    assert whole.keys() == again.keys()
    assert [path for path, value in whole.items() if not torch.equal(again[path], value)] == []
    metrics = [line["eval_loss"] for line in lines(runs / f"{name}, again") if "eval_loss" in line]
    evaluated = [line["eval_loss"] for line in lines(runs / name) if "eval_loss" in line]
    assert metrics[-len(evaluated) + SAVED // 2 :] == evaluated[SAVED // 2 :]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_checkpoints_have_plain_tensors_and_a_run_goes_on_without_float8(runs: Path, name: str) -> None:
    plain, found, without = (load_tensors(runs / of, STEPS) for of in ("bf16", name, f"{name}, without"))
    assert found.keys() == plain.keys() == without.keys()
    assert {type(value) for value in found.values()} == {torch.Tensor}
    assert {path: value.dtype for path, value in found.items()} == {path: value.dtype for path, value in plain.items()}
    differ = [path for path, value in found.items() if "weight" in path and not torch.equal(without[path], value)]
    assert differ, "expected other numbers without float8"


def test_exports_have_the_weights_of_the_checkpoint_and_need_no_torchao(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    exported = export(RunDir(runs / "tensorwise"), STEPS, ExportWish(dtype="fp32", weights="model"))
    saved, whole = load_tensors(runs / "tensorwise", STEPS), torch.load(runs / "whole.pt")
    written = load_file(exported / "model.safetensors")
    assert written.keys() == whole.keys()
    for name, value in written.items():
        assert torch.equal(value, saved[f"/model/{name}"]), name
        assert torch.equal(value, whole[name]), name


def test_event_names_the_layers_in_float8(runs: Path) -> None:
    built = {name: next(e for e in read_lines(RunDir(runs / name).attempt(1).events) if e["event"] == "model_built")
             for name in ("bf16", "rowwise")}  # fmt: skip
    assert built["bf16"]["float8"] is None
    assert built["rowwise"]["float8"] == {"scaling": "rowwise", "linears": 14, "left_out": [], "emulated": True}
