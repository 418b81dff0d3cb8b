"""Weights for a sharded model: random, or from a Hugging Face folder, of which each rank reads its own slices.

Only safetensors are read, never pickle. A file is mapped for one tensor at a time. Besides its shard, a worker
therefore holds at most its slice of one tensor, including the pages of the file.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.build import allocate, draw_weights, materialise
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.family import Join, StoredNames
from train_loop.model.fill import fill
from train_loop.model.folder import model_folder
from train_loop.model.lora.base import DrawnWeights
from train_loop.model.lora.names import by_plain_name
from train_loop.model.quantize import quantized_layers
from train_loop.model.weight_map import conversion, read_weight_map, some
from train_loop.spec import ModelSpec
from train_loop.system.input_files import descriptor_path, open_input

_MOST_TENSORS, _LONGEST_NAME = 1 << 17, 1024
"""Limits of a file: number of its tensors, and characters of a name."""
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Names of dtypes in safetensors that hold a weight itself; others need a scale."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, as described in the file's header."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of its dtype in safetensors, such as BF16."""
    by_row = True

    @property
    def label(self) -> str:
        """Return the name for a message."""
        return self.name

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Return a part of the tensor in its stored dtype; its pages stay mapped as long as the result lives."""
        with open_tensors(self.file) as file:
            values: Tensor = file.get_slice(self.name)[part]
            return values


@dataclass(frozen=True)
class Joined:
    """A tensor that is made of several in files, as those of experts that are stored one by one."""

    join: Join
    parts: tuple[tuple[Stored, ...], ...]
    shape: tuple[int, ...]

    @property
    def file(self) -> Path:
        """Return the file of the first of them."""
        return self.parts[0][0].file

    @property
    def name(self) -> str:
        """Return the name of the first of them."""
        return self.parts[0][0].name

    @property
    def by_row(self) -> bool:
        """Return whether stored tensors are whole rows of it."""
        return self.join.by_row

    @property
    def label(self) -> str:
        """Return the name of the first of them, and the number of the others, for a message about all."""
        return f"{self.name} joined with {sum(map(len, self.parts)) - 1} others"

    @property
    def dtype(self) -> str:
        """Return a dtype of the stored tensors; a quantised one, if there is any."""
        return min((one.dtype for one in chain(*self.parts)), key=_FLOATS.__contains__)

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Return a part of the tensor, for which only the stored tensors of its rows are read if that is possible."""
        rows = part[0] if self.join.by_row else slice(None)
        read = [[one.read((slice(None),) * len(one.shape)) for one in names[rows]] for names in self.parts]
        if not read[0]:
            return torch.empty((0, *self.shape[1:]))[(slice(None), *part[1:])]
        return self.join.make(read)[(slice(None) if self.join.by_row else part[0], *part[1:])]


def _joined(join: Join, found: Mapping[str, Stored]) -> Joined:
    """Return a tensor whose shape follows from those of its parts. Raises ModelError if they do not fit together."""
    parts = tuple(tuple(found[name] for name in names) for names in join.parts)
    made = join.make([[torch.empty(one.shape, device="meta") for one in of] for of in parts])
    return Joined(join, parts, tuple(made.shape))


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file of a model. Raises ModelError if it is missing or damaged, DataError as `open_input`."""
    try:
        with open_input(path) as opened, safe_open(descriptor_path(opened, path), "pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ModelError(f"{path} not found; copy the folder again") from error
    except SafetensorError as error:
        raise ModelError(f"{path} is not a complete safetensors file: {error}; copy it again") from error


class WeightSource(NamedTuple):
    """How the weights of a model in a folder are read."""

    needed: bool = True
    """False if a checkpoint replaces all weights: then they are neither drawn nor read."""
    readers: dist.ProcessGroup | None = None
    """Group whose first rank reads for all of its ranks; None: each rank reads its own slices."""
    drawn: DrawnWeights | None = None
    """Gets the weights that are drawn."""


EACH_RANK = WeightSource()


def give_weights(
    model: nn.Module,
    blueprint: Anatomy,
    spec: ModelSpec,
    *,
    seed: int,
    device: torch.device,
    source: WeightSource = EACH_RANK,
) -> list[str]:
    """Allocate a sharded model and load its weights; `blueprint` is the same model on meta, before sharding.

    Without a folder the weights are random. Returns the tensors of the folder that the model does not use. Raises
    ModelError if the folder's tensors do not match the model.
    """
    folder = model_folder(spec)
    if folder is None:
        if source.needed:
            materialise(model, blueprint, seed=seed, device=device, drawn=source.drawn)
        else:
            allocate(model, blueprint, device=device)
        return []
    homes, unused = match_folder(blueprint, folder)
    allocate(model, blueprint, device=device, stored=[name for name, stored in homes.items() if stored])
    if not source.needed:
        return unused
    absent = [name for name, stored in homes.items() if not stored]
    draw_weights(model, blueprint, absent, seed=seed, drawn=source.drawn)
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers())
    targets = by_plain_name(model, named)
    quantized = quantized_layers(model)
    for name, stored in homes.items():
        if stored:
            with quantized[name].writable() if name in quantized else nullcontext(targets[name]) as target:
                fill(target, stored, source.readers)
    return unused


class FolderMatch(NamedTuple):
    """The tensors of a folder as a model uses them."""

    homes: dict[str, list[Stored | Joined]]
    """Stored tensors of each model tensor, by name."""
    unused: list[str]
    """Tensors of an older version of the model, which now computes them, or of a part that is not trained."""


def match_folder(blueprint: Anatomy, folder: Path) -> FolderMatch:
    """Match the stored tensors with those of a model, from file headers alone.

    A tied tensor may be stored twice. A tensor may be missing only if the model itself allows that. Raises ModelError
    that names the tensors which are missing, unexpected or of wrong shape.
    """
    model, found = blueprint.model, read_headers(folder)
    names = blueprint.family.stored_names(model, {name: stored.shape for name, stored in found.items()})
    left, lost, others = _by_own_name(names, found)
    homes = {of[0]: [left.pop(name) for name in of if name in left] for of in _tensors(model)}
    tensors = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    unused = [stored for stored in left.values() if stored.name in names.unused]
    faults = {
        "missing": [
            one
            for name, stored in homes.items()
            if not stored and name not in names.optional
            for one in lost.get(name, [f"{name} {_shape(shapes[name])}"])
        ],
        "unexpected": [f"{s.name} {_shape(s.shape)}" for s in [*left.values(), *others] if s not in unused],
        "wrong shape": [
            f"{s.label} is {_shape(s.shape)}, expected {_shape(shapes[name])}"
            for name, stored in homes.items()
            for s in stored
            if s.shape != shapes[name]
        ],
        "quantised": [
            f"{s.name} has values of dtype {s.dtype}"
            for name, stored in homes.items()
            for s in stored
            if s.dtype not in _FLOATS and tensors[name].is_floating_point()
        ],
    }
    if faults["quantised"]:
        raise ModelError(
            f"{folder} holds quantised weights, which cannot be trained: {some(faults['quantised'])}; give the folder "
            "of the original model, such as one in bf16"
        )
    if any(faults.values()):
        raise ModelError(
            f"the tensors in {folder} do not match {type(model).__name__} of its config.json: "
            f"{'; '.join(f'{kind}: {some(which)}' for kind, which in faults.items() if which)}; give the folder of a "
            "causal language model with the config.json that belongs to it"
        )
    return FolderMatch(homes, [stored.name for stored in unused])


def _by_own_name(
    names: StoredNames, found: Mapping[str, Stored]
) -> tuple[dict[str, Stored | Joined], dict[str, list[str]], list[Stored]]:
    """Return a folder's tensors by the model's names, the parts that tensors lack, and the parts that none has."""
    left: dict[str, Stored | Joined] = {names.own[name]: stored for name, stored in found.items()}
    lost, used = dict[str, list[str]](), set[str]()
    for target, join in names.joins.items():
        del left[target]
        parts = [*chain(*join.parts)]
        used.update(parts)
        if absent := [name for name in parts if name not in found]:
            lost[target] = absent
        else:
            left[target] = _joined(join, found)
    # Experts beyond the model's, and a tensor that is stored whole besides its parts.
    return left, lost, [one for name, one in found.items() if names.own[name] in names.joins and name not in used]


def absent_weights(blueprint: Anatomy, spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters that a spec's folder lacks, so that they are drawn; empty without a folder."""
    folder, model = model_folder(spec), blueprint.model
    if folder is None:
        return frozenset()
    names = blueprint.family.stored_names(model, {name: one.shape for name, one in read_headers(folder).items()})
    stored, parameters = {*names.own.values()}, dict(model.named_parameters())
    return frozenset(of[0] for of in _tensors(model) if of[0] in parameters and stored.isdisjoint(of))


def read_headers(folder: Path, stem: str = "model") -> dict[str, Stored]:
    """Return every tensor in a folder's safetensors files by name, without reading data. Raises ModelError.

    `stem` begins the names of the files.
    """
    whole = folder / f"{stem}.safetensors"
    if whole.is_file():
        return {stored.name: stored for stored in _header(whole)}
    index = _read_index(folder, stem)
    files = [folder / name for name in sorted(set(index.values()))]
    stored = {stored.name: stored for file in files for stored in _header(file)}
    lost = sorted(index.keys() - stored.keys())
    if lost:
        raise ModelError(
            f"the index of {folder} names tensors that its files do not contain: {some(lost)}; copy it again"
        )
    return stored


def weight_files(model: ModelSpec) -> set[Path]:
    """Return the config and the files with weights of a model's folder; empty without one. Raises ModelError."""
    folder = model_folder(model)
    return set() if folder is None else {folder / "config.json", *(one.file for one in read_headers(folder).values())}


def _read_index(folder: Path, stem: str = "model") -> dict[str, str]:
    """Return the file of each tensor from an index. Raises ModelError."""
    path = folder / f"{stem}.safetensors.index.json"
    try:
        return read_weight_map(path, "safetensors")
    except FileNotFoundError as error:
        found = conversion(folder)
        raise ModelError(
            f"{folder} holds neither {stem}.safetensors nor {path.name}"
            f"{f' but {found}' if found else '; give a folder with weights'}"
        ) from error


def _header(file: Path) -> Iterable[Stored]:
    with open_tensors(file) as content:
        names = content.keys()
        if len(names) > _MOST_TENSORS:
            raise ModelError(f"{file} holds {len(names)} tensors; at most {_MOST_TENSORS} are read, split the file")
        if long := next((name for name in names if len(name) > _LONGEST_NAME), None):
            raise ModelError(
                f"{file} holds a tensor whose name, {long[:60]}…, has {len(long)} characters; at most {_LONGEST_NAME} "
                "are read, rename it"
            )
        described = ((name, content.get_slice(name)) for name in names)
        return [Stored(file, name, tuple(one.get_shape()), one.get_dtype()) for name, one in described]


def _tensors(model: nn.Module) -> Iterable[list[str]]:
    """Return all names of each parameter and persistent buffer; tied tensors have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names.values()


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
