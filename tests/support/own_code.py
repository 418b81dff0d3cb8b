"""Own code in tests: packages, rows and specs."""

import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Adafactor

from tests.support.builders.specs import code_spec
from train_loop.code.load import OwnCode
from train_loop.model.build import materialise
from train_loop.model.families.own import OwnModels
from train_loop.optim.eight_bit import adamw_8bit_class
from train_loop.spec import parse

EXAMPLES = Path("examples/own-model")
NAMES = ("simple", "transformer", "vit")
ZOO = "zoo"
"""Name of a module with parts of many kinds, in the form of an example."""
ROWS, STEPS, EVERY = 50, 7, 3
"""Rows, optimizer steps and steps between checkpoints of `example_job`."""
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.last = nn.Linear(width, 1)
    def forward(self, x):
        return self.last(self.first(x).tanh())

def build(config):
    return Model(**config)

def batch(columns):
    return {"x": columns["x"], "y": columns["y"]}

def loss(model, batch):
    return F.mse_loss(model(batch["x"]).squeeze(-1), batch["y"], reduction="sum"), len(batch["y"])
"""


def write_package(folder: Path, text: str = MODEL) -> Path:
    """Write a package of one module, mymodel."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mymodel.py").write_text(text)
    return folder


def write_rows(path: Path, count: int = 6) -> Path:
    """Write rows of two features x and a number y."""
    values = pa.array([float(number % 7) for number in range(2 * count)], pa.float32())
    table = {"x": pa.FixedSizeListArray.from_arrays(values, 2), "y": pa.array([1.0] * count, pa.float32())}
    pq.write_table(pa.table(table), path)
    return path


def own_spec(folder: Path, text: str = MODEL, **parts: dict[str, Any]) -> dict[str, Any]:
    """Write a package and rows into a folder, and return a spec that trains on them, with fields overridden."""
    package, rows = write_package(folder / "code", text), write_rows(folder / "rows.parquet")
    raw = code_spec(**parts)
    raw["code"] = {"package": package.as_uri(), "config": {"width": 3}} | raw["code"] | {"package": package.as_uri()}
    raw["data"] = raw["data"] | {"train": {"path": str(rows)}}
    return raw


@contextmanager
def forget_imports() -> Iterator[None]:
    """Forget the modules that the body imports, and its changes of sys.path."""
    modules, path = set(sys.modules), [*sys.path]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if getattr(sys.modules[name], "__file__", None) and "trainshed-code-" in str(sys.modules[name].__file__):
                del sys.modules[name]


def example(name: str) -> ModuleType:
    """Import the module of an example from its file."""
    found = [Path("tests/support/own_zoo.py")] if name == ZOO else (EXAMPLES / name).glob("*.py")
    (file,) = (one for one in found if one.name != "files.py")
    spec = importlib.util.spec_from_file_location(f"example_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def write_example(folder: Path, name: str) -> None:
    """Write the package of an example and its rows into a folder."""
    if name == ZOO:
        (folder / name).mkdir()
        shutil.copy("tests/support/own_zoo.py", folder / name / "zoo.py")
    else:
        shutil.copytree(EXAMPLES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    columns = columns_of(name)
    write_columns(folder / f"{name}.parquet", columns)
    if name == "vit":
        write_columns(folder / "png.parquet", columns | {"image": [_png(pixels) for pixels in columns["image"]]})


def _png(pixels: bytes) -> bytes:
    file = BytesIO()
    Image.frombytes("RGB", (16, 16), pixels).save(file, "PNG")
    return file.getvalue()


def columns_of(name: str) -> dict[str, Any]:
    """Return the rows of an example: tensors, or lists of Python values."""
    if name == ZOO:
        rows: dict[str, Any] = example(name).rows(ROWS)
        return rows
    if name == "simple":
        return dict(zip(("features", "label"), example(name).rows(ROWS, 16, 4), strict=True))
    if name == "vit":
        images, labels = example(name).rows(ROWS, 4)
        return {"image": [image.tobytes() for image in images], "label": labels}
    return {"tokens": torch.randint(0, 8, (ROWS, 9), generator=torch.Generator().manual_seed(0))}


def write_columns(path: Path, columns: dict[str, Any]) -> None:
    """Write tensors and lists as columns of a Parquet file."""
    table = {}
    for name, values in columns.items():
        if isinstance(values, list):
            table[name] = pa.array(values)
            continue
        flat = pa.array(values.flatten().numpy())
        table[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
    pq.write_table(pa.table(table), path)


def _zoo_job() -> dict[str, Any]:
    functions = {"model": "zoo:build", "loss": "zoo:loss", "batch": "zoo:batch", "sums": ["right", "rows"]}
    return {
        "name": "own-zoo",
        "code": functions,
        "model": {"dtype": "fp32"},
        "data": {"columns": {"own": ["tokens", "image", "name"]}},
        "training": {"learning_rate": 0.01, "max_steps": STEPS},
        "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 1}},
    }


def example_job(folder: Path, name: str) -> dict[str, Any]:
    """Return the spec of an example whose package and rows are in a folder; its last step has two rows."""
    raw: dict[str, Any] = _zoo_job() if name == ZOO else yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    raw["code"]["package"] = str(folder / name)
    raw["data"] |= {
        "train": {"path": str(folder / f"{name}.parquet")},
        "eval": {"path": str(folder / f"{name}.parquet")},
    }
    del raw["training"]["max_steps"]
    raw["training"] |= {"num_train_epochs": 100 / ROWS, "lr_scheduler_type": "constant", "audit_samples": True}
    raw["training"] |= {"global_batch_size": 16, "per_device_train_batch_size": 4, "eval_steps": STEPS}
    # Adam divides a gradient by its own size, even if it is only rounding: a floor keeps meshes comparable.
    raw["training"] |= {"adam_epsilon": 1e-4}
    raw["checkpoint"] = {"every_steps": EVERY, "keep_last": 9}
    return raw


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float, float], Any]] = {
    "adamw": lambda trained, lr, eps: torch.optim.AdamW(trained, lr=lr, eps=eps, weight_decay=0.0),
    "sgd": lambda trained, lr, _: torch.optim.SGD(trained, lr=lr, momentum=0.9),
    "adafactor": lambda trained, lr, _: Adafactor(trained, lr=lr, scale_parameter=False, relative_step=False),
    "adamw_8bit": lambda trained, lr, eps: adamw_8bit_class()([{"params": trained}], lr, eps=eps, weight_decay=0.0),
}
"""The libraries' optimizers, by the name in a spec."""


def plain_loop(
    folder: Path, name: str, steps: list[dict[str, Any]], raw: dict[str, Any] | None = None
) -> tuple[list[float], float, dict[str, Tensor]]:
    """Train an example with PyTorch alone on the samples of metrics lines. Return losses, evaluation and weights.

    With bf16, it computes in micro-batches of sorted samples, because the gradients of each are rounded.
    """
    job, module, columns = parse(raw or example_job(folder, name)), example(name), columns_of(name)
    assert job.code is not None
    anatomy = OwnModels(OwnCode(job.code, folder / name, module.build, module.loss, module.batch)).build(job.model)
    model = module.build(job.code.config)
    materialise(model, anatomy, seed=job.training.seed, device=torch.device("cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[job.training.optimizer](trained, job.training.learning_rate, job.training.adam_epsilon)
    averages, losses = [parameter.detach().clone() for parameter in trained], []
    is_half = job.model.dtype == "bf16"

    def sums(rows: Sequence[int]) -> Iterator[tuple[Tensor, Any]]:
        size = job.training.micro_batch if is_half else len(rows)
        for part in (rows[start : start + size] for start in range(0, len(rows), size)):
            total, count, *_ = module.loss(_InHalf(model) if is_half else model, module.batch(_taken(columns, part)))
            yield total, count

    for line in steps:
        found = [(total, count) for total, count in sums(line["samples"])]
        count = sum(float(count) for _, count in found)
        for total, _ in found:
            torch.autograd.backward(total / count)
        torch.nn.utils.clip_grad_norm_(trained, job.training.max_grad_norm or 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(total.item() for total, _ in found) / count)
        for average, parameter in zip(averages, trained, strict=True):
            average.lerp_(parameter.detach(), 1 - (job.training.ema_decay or 0.0))
    weights = {name: values.clone() for name, values in model.state_dict().items()}
    with torch.no_grad():
        for average, parameter in zip(averages, trained, strict=True):
            parameter.copy_(average)
        model.eval()
        totals, counts = zip(*sums(range(ROWS)), strict=True)
    return losses, sum(one.item() for one in totals) / sum(float(one) for one in counts), weights


class _InHalf:
    """A model with fp32 weights that computes in bf16, as FSDP's mixed precision does."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *inputs: Tensor) -> Any:
        weights = {name: values.bfloat16() for name, values in self._model.named_parameters()}
        cast = tuple(value.bfloat16() if value.is_floating_point() else value for value in inputs)
        return functional_call(self._model, weights, cast)


def first_batch(name: str, rows: int) -> dict[str, Tensor]:
    """Return the batch of the first rows of an example."""
    batch: dict[str, Tensor] = example(name).batch(_taken(columns_of(name), range(rows)))
    return batch


def _taken(columns: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """Return some rows as own code gets them."""
    return {
        key: values[torch.tensor(list(rows))] if isinstance(values, Tensor) else [_as_own(values[row]) for row in rows]
        for key, values in columns.items()
    }


def _as_own(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, list) else value
