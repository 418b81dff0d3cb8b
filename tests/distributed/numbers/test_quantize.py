"""Adapters on a quantised base: the numbers of the restored weights, and the same bits at every number of ranks."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.builders.folders import write_model
from tests.support.builders.small_runs import LENGTH, lines, numbers, run
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.adapters import Step, adapter_step, peft_step
from tests.support.ranks.gradients import build, forget_meshes, random_rows
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_tensors, write_tokens
from train_loop import train
from train_loop.conformance.measure import whole
from train_loop.loop.build import Run
from train_loop.model.quantize import QuantizedLinear, quantise, quantized_layers, restore
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec

CallRanks = Callable[..., Any]
CONFIG = TINY | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
ROWS = random_rows(12, LENGTH, vocab=200, packed=False)
LORA = {"r": 3, "alpha": 6.0, "target_modules": ["q_proj", "down_proj"]}
PEFT: dict[str, Any] = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "unequal shards": (3, {}),
    "replicas, read by one rank": (4, {"strategy": {"fsdp_size": 2}, "model": {"load": "rank0"}}),
    "recomputed": (2, {"model": {"gradient_checkpointing": {"every": 2}}}),
    "products kept": (2, {"model": {"gradient_checkpointing": "selective"}}),
}


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[CallRanks]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=200)
    write_model(folder / "base", **CONFIG)
    return folder


def job_of(folder: Path, kind: str, world: int, parts: dict[str, Any]) -> JobSpec:
    model = {"path": str(folder), "config": None, "dtype": "fp32", "gradient_checkpointing": "none", "lora": LORA}
    return spec(
        model=model | {"quantize_base": kind} | parts.get("model", {}),
        data={"packing": False},
        training={"global_batch_size": 12, "per_device_train_batch_size": 1},
        strategy=parts.get("strategy", {}),
        scaling={"num_workers": world},
    )


def step_and_weights(job: JobSpec, rows: Any) -> tuple[Step, dict[str, Tensor]]:
    """Return what a step of all ranks computes, and the codes and scales of the quantised weights."""
    forget_meshes()
    model, *_ = build(job)
    return adapter_step(job, rows), stored(quantized_layers(model))


def stored(layers: dict[str, QuantizedLinear]) -> dict[str, Tensor]:
    return {
        f"{name}/{part}": whole(getattr(layer, part).detach()).clone()
        for name, layer in layers.items()
        for part in ("codes", "scales")
    }


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_step_equals_that_of_peft_on_the_restored_weights(call_ranks: CallRanks, home: Path, kind: Any) -> None:
    found = {
        name: call_ranks(world, step_and_weights, job_of(home / "base", kind, world, parts), ROWS)
        for name, (world, parts) in SETTINGS.items()
    }
    weights = load_file(home / "base" / "model.safetensors")
    inside = {name for name in weights if "layers." in name and "_proj." in name}
    (_, _, trained), codes = found["one rank"]
    assert codes.keys() == {f"{name}/{part}" for name in inside for part in ("codes", "scales")}
    restored = {name: restore(*quantise(weights[name], kind), kind, torch.float32) for name in inside}
    assert all(torch.equal(codes[f"{name}/codes"], quantise(weights[name], kind)[0]) for name in inside)
    shutil.copytree(home / "base", home / kind)
    save_file(weights | restored, home / kind / "model.safetensors", metadata={"format": "pt"})
    loss, expected = peft_step(home / kind, ROWS, trained, **PEFT)
    plain, _ = peft_step(home / "base", ROWS, trained, **PEFT)
    assert loss != plain
    for setting, ((own, gradients, values), held) in found.items():
        assert own == pytest.approx(loss, rel=1e-5), setting
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            assert (gradients[name] - value).norm() <= 1e-5 * value.norm(), (setting, name)
        assert [name for name in trained if not torch.equal(values[name], trained[name])] == [], setting
        assert [name for name in codes if not torch.equal(held[name], codes[name])] == [], setting


def train_adapters(home: Path, name: str, training: dict[str, Any]) -> dict[str, Tensor]:
    """Train on a rank, and return the quantised weights after it."""
    kept, build_run = list[Run](), train.build_run  # type: ignore[attr-defined]

    def keep(*arguments: Any) -> Run:
        kept.append(build_run(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_run", keep)
        model = {"path": str(home / "base"), "config": None, "dtype": "bf16", "lora": LORA, "quantize_base": "nf4"}
        run(home / "d.parquet", home / name, model=model, **training)
    return stored(quantized_layers(kept[0].state.model))


def test_runs_and_resizes_keep_the_quantised_weights_and_save_adapters_only(call_ranks: CallRanks, home: Path) -> None:
    before = call_ranks(2, train_adapters, home, "whole", {})
    for world, last in ((2, {"max_steps": 4}), (2, {})):
        after = call_ranks(world, train_adapters, home, "again", last)
    elsewhere = call_ranks(3, train_adapters, home, "three", {"global_batch_size": 6})
    for weights in (after, elsewhere):
        assert weights.keys() == before.keys()
        assert [name for name, value in before.items() if not torch.equal(weights[name], value)] == []
    assert [numbers(line) for line in lines(home / "again")] == [numbers(line) for line in lines(home / "whole")]
    saved = load_tensors(home / "whole", 6)
    resumed = load_tensors(home / "again", 6)
    assert [path for path, value in saved.items() if not torch.equal(resumed[path], value)] == []
    assert all("lora_" in path for path in saved if path.startswith("/model/"))
    events = read_lines(RunDir(home / "whole").attempt(1).events)
    (built,) = (event for event in events if event["event"] == "model_built")
    assert built["dtypes"]["frozen linear layers"] == "nf4"
    config = json.loads((home / "base" / "config.json").read_text())
    assert built["parameters"] - built["trained_parameters"] == sum(
        value.numel() for value in load_file(home / "base" / "model.safetensors").values()
    ), config


def test_any_size_has_the_bits_of_the_undisturbed_run(call_ranks: CallRanks, home: Path) -> None:
    training = {"reproducible": "any_size", "reduction_tree": {"max_shards": 4, "max_replicas": 1}}
    call_ranks(2, train_adapters, home, "any whole", training)
    for world, last in ((4, {"max_steps": 4}), (1, {})):
        call_ranks(world, train_adapters, home, "any parts", training | last)
    whole_run, parts = (load_tensors(home / name, 6) for name in ("any whole", "any parts"))
    assert whole_run.keys() == parts.keys()
    assert [path for path, value in whole_run.items() if not torch.equal(parts[path], value)] == []
    assert [numbers(line) for line in lines(home / "any parts")] == [
        numbers(line) for line in lines(home / "any whole")
    ]
