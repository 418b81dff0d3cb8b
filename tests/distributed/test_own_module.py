"""A module with parts of many kinds on changing meshes equals its plain PyTorch loop.

The module has branches that only some rows use, a unit that is called twice, tied, frozen and convolution weights, an
LSTM, and buffers; its rows are ragged lists, bytes and text with different counts.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.test_own_code import lines, train_once
from tests.support.own_code import STEPS, ZOO, example, example_job, plain_loop, write_example
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import load_tensors
from train_loop.checkpoint.export.huggingface import export
from train_loop.errors import ModelError
from train_loop.parallel.mesh import build_mesh
from train_loop.parallel.unit_calls import UnitCalls
from train_loop.plan import plan_mesh
from train_loop.run_dir import ExportWish, RunDir
from train_loop.spec import parse

UNITS = {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]}}
Call = Callable[..., Any]


def train_here(raw: dict[str, Any], place: Path, steps: int | None = None) -> None:
    tempfile.tempdir = str(place.parent)
    train_once(parse(raw), place, place.parent, steps=steps)


def zoo_job(folder: Path, world: int, **parts: dict[str, Any]) -> dict[str, Any]:
    raw = example_job(folder, ZOO)
    scaling = {"scaling": raw["scaling"] | {"num_workers": world}}
    return raw | scaling | {name: raw.get(name, {}) | fields for name, fields in parts.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    write_example(folder, ZOO)
    return folder


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    with ranks_of_any_number(4) as call:
        yield call


def resized_job(folder: Path, world: int) -> dict[str, Any]:
    training = example_job(folder, ZOO)["training"] | {"ema_decay": 0.5, "per_device_train_batch_size": 2}
    model = {"gradient_checkpointing": "full"}
    return zoo_job(folder, world, strategy=UNITS | {"fsdp_size": 2}, training=training, model=model)


@pytest.fixture(scope="module")
def resized(folder: Path, call: Call) -> Path:
    """Return a run of two ranks that continues with HSDP 2 x 2."""
    for world, steps in ((2, 4), (4, None)):
        call(world, train_here, resized_job(folder, world), folder / "resized", steps)
    return folder / "resized"


def test_resized_run_equals_the_plain_loop(folder: Path, resized: Path) -> None:
    found = lines(resized)
    losses, evaluation, weights = plain_loop(folder, ZOO, found, resized_job(folder, 2))
    assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-5)
    assert found[-1]["eval_loss"] == pytest.approx(evaluation, rel=1e-5)
    saved = load_tensors(resized, STEPS)
    for name, values in weights.items():
        torch.testing.assert_close(saved[f"/model/{name}"], values, rtol=1e-5, atol=1e-5)


def test_export_loads_into_the_plain_module(folder: Path, resized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    exported = export(RunDir(resized), STEPS, ExportWish(dtype="fp32"))
    module = example(ZOO).build({})
    missing, unexpected = load_model(module, str(exported / "model.safetensors"))
    assert not missing
    assert not unexpected
    saved = load_tensors(resized, STEPS)
    assert [
        name for name, values in module.state_dict().items() if not torch.equal(values, saved[f"/model/{name}"])
    ] == []


def test_any_size_run_with_dropout_has_the_same_bits_on_one_rank_and_on_four(folder: Path, call: Call) -> None:
    tree = {"max_shards": 2, "max_replicas": 2}
    training = example_job(folder, ZOO)["training"] | {"reproducible": "any_size", "reduction_tree": tree}
    code = example_job(folder, ZOO)["code"] | {"config": {"dropout": 0.3, "repeats": 1}}
    runs = []
    for world in (1, 4):
        place = folder / f"any size {world}"
        call(
            world,
            train_here,
            zoo_job(folder, world, strategy=UNITS | {"fsdp_size": world // 2}, training=training, code=code),
            place,
        )
        tensors = {name: values for name, values in load_tensors(place, STEPS).items() if not name.startswith("/rng")}
        runs.append(([(line["loss"], line["grad_norm"], line.get("eval_loss")) for line in lines(place)], tensors))
    (numbers, expected), (others, found) = runs
    assert numbers == others
    assert [name for name, values in expected.items() if not torch.equal(found[name], values)] == []


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


def call_in_orders(orders: tuple[list[int], list[int]], step: int) -> str:
    """Return the error of a step in which each rank calls layers in its own order."""
    mesh = build_mesh(plan_mesh(world=2, fsdp_size=0, ulysses_size=1), torch.device("cpu"))
    model = Layers()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh.fsdp)
    calls = UnitCalls(model, mesh, once=False)
    for _ in range(step):
        calls.begin_step()

    def train() -> None:
        total = model(torch.ones(1, 3), orders[mesh.rank]).sum()
        calls.end_forward()
        total.backward()
        calls.end_micro_batch(stands_in=False)
        calls.agree()

    with pytest.raises(ModelError) as raised:
        train()
    return str(raised.value)


@pytest.mark.parametrize(
    ("orders", "step", "message"),
    [
        (([0, 1], [0]), 1, "one rank called the layer layers.1 while another called no further layer: FSDP gathers"),
        (([0, 1], [1, 0]), 3, "one rank called the layer layers.0 while another called the layer layers.1: FSDP"),
        (([0, 1], [1, 0]), 4, "ranks called the FSDP units of the module in different orders in one step: FSDP"),
        (([0, 0], [1, 1]), 4, "ranks called the layer layers.0 0 to 2 times in one step: FSDP gathers"),
    ],
)
def test_ranks_that_call_other_layers_end_with_the_rule(
    call: Call, orders: tuple[list[int], list[int]], step: int, message: str
) -> None:
    assert call(2, call_in_orders, orders, step).startswith(message)
