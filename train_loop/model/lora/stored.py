"""Values of adapters from a folder that peft wrote (`model.adapter`), for a model that is sharded or on meta.

peft's files have the names of `PeftModel`, without the name of the adapters: `base_model.model.…q_proj.lora_A.weight`,
`….lora_magnitude_vector`, and whole tensors of `modules_to_save` by their own names.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.fill import fill
from train_loop.model.load import Stored
from train_loop.model.lora.adapters import ADAPTER, MAGNITUDE, trained_parameters
from train_loop.model.lora.peft_config import PREFIX, AdapterFolder, read_adapter
from train_loop.model.weight_map import some

_CURRENT = (0, 19, 1)
"""First version of peft with the current order of the inputs and outputs of experts."""
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Swapped:
    """A or B of experts from an older peft, where inputs and outputs of a stored tensor were taken for each other.

    Its A is [experts x r, out] and its B [in, r x experts]: the current A follows from that B, and B from that A.
    """

    other: Stored
    """The stored B for A, and A for B."""
    experts: int
    is_a: bool
    """True for A, [experts x r, in]; else B, [out, r x experts]."""
    by_row = False

    @property
    def name(self) -> str:
        """Return the name of the stored tensor."""
        return self.other.name

    @property
    def file(self) -> Path:
        """Return its file."""
        return self.other.file

    @property
    def dtype(self) -> str:
        """Return its dtype."""
        return self.other.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the current shape."""
        rows, columns = self.other.shape
        return columns, rows

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Return a part of the current tensor."""
        whole = self.other.read((slice(None), slice(None)))
        rows, columns = self.shape
        if self.is_a:
            made = whole.reshape(columns, -1, self.experts).permute(2, 1, 0).reshape(rows, columns)
        else:
            made = whole.reshape(self.experts, -1, rows).permute(2, 1, 0).reshape(rows, columns)
        return made[part]


def fill_adapters(model: nn.Module, folder: Path, readers: dist.ProcessGroup | None) -> None:
    """Set a rank's parts of all trained parameters to the values in a folder.

    `readers` is that of `fill`. Raises ModelError as `match_adapters`, DataError.
    """
    tensors = trained_parameters(model) | dict(model.named_buffers())
    for name, stored in match_adapters(model, read_adapter(folder)).items():
        fill(tensors[name], [stored], readers)


def match_adapters(model: nn.Module, found: AdapterFolder) -> dict[str, Stored | Swapped]:
    """Return the stored tensor of each trained parameter of a model with adapters, from file headers alone.

    A folder may have the buffers of modules that are trained whole, too. Raises ModelError with the names of tensors
    that are missing, left over, of another shape or without float values.
    """
    wanted, experts, buffers = trained_parameters(model), _experts(model), dict(model.named_buffers())
    left: dict[str, Stored] = dict(found.tensors)
    homes: dict[str, Stored | Swapped] = {name: left.pop(of) for name in wanted if (of := stored_name(name)) in left}
    if found.version < _CURRENT:
        homes |= _by_older_version(wanted, homes, experts)
    missing = [name for name in wanted if name not in homes]
    numbers = [one for one in homes.values() if one.dtype not in _FLOATS]
    homes |= {name: left.pop(name) for name in buffers.keys() & left.keys()}
    tensors: dict[str, Tensor] = {**wanted, **buffers}
    faults = {
        "missing": [f"{PREFIX}{stored_name(name)} {list(wanted[name].shape)}" for name in missing],
        "left over": [f"{one.name} {list(one.shape)}" for one in left.values()],
        "wrong shape": [
            f"{one.name} is {list(one.shape)}, expected {list(tensors[name].shape)}"
            for name, one in homes.items()
            if one.shape != tuple(tensors[name].shape)
        ],
        "no floats": [f"{one.name} has dtype {one.dtype}" for one in numbers],
    }
    if any(faults.values()):
        told = "; ".join(f"{kind}: {some(which)}" for kind, which in faults.items() if which)
        raise ModelError(
            f"the tensors in {found.folder} do not match the adapters of {type(model).__name__}: {told}; "
            f"{_remedy(missing, left)}"
        )
    return homes


def _remedy(missing: Iterable[str], left: Collection[str]) -> str:
    """Return what to do about a folder that does not match, given the model's names and the folder's."""
    holders = (name.rpartition(".")[0] for name in missing)
    if (above := next((one for one in holders if f"{one}.lora_A.weight" in left), None)) is not None:
        if any(name.startswith(f"{above}.base_layer.") for name in left):
            return f"it trains {above} whole and with an adapter; choose one of both, and train adapters anew"
        return (
            f"its adapters are above weights of {above} that were random and are in no file, so that their outputs "
            "cannot be computed again; train adapters anew"
        )
    return (
        "give the folder of adapters that were trained on the model in model.path; remove model.lora, whose settings "
        "the folder has"
    )


def stored_name(name: str) -> str:
    """Return the name in peft's files, without its prefix, of a trained parameter."""
    holder, dot, rest = name.rpartition(f".{MAGNITUDE}.")
    if dot and rest == f"{ADAPTER}.weight":
        return f"{holder}.{MAGNITUDE}"
    for kind in ("lora_A", "lora_B"):
        holder, dot, rest = name.rpartition(f".{kind}.")
        if dot and rest == f"{ADAPTER}.weight":
            return f"{holder}.{kind}.weight"
    return name


def _experts(model: nn.Module) -> dict[str, int]:
    """Return the numbers of experts of adapters of parameters, by the names of their layers."""
    named: list[tuple[str, Any]] = list(model.named_modules())
    return {name: one.num_experts for name, one in named if hasattr(one, "parameter_name")}


def _by_older_version(
    wanted: Mapping[str, Tensor], homes: Mapping[str, Stored | Swapped], experts: Mapping[str, int]
) -> dict[str, Swapped]:
    """Return the adapters of experts whose inputs and outputs are swapped, as their shapes show. Raises ModelError."""
    swapped = dict[str, Swapped]()
    for layer, count in experts.items():
        a, b = (f"{layer}.lora_{kind}.{ADAPTER}.weight" for kind in "AB")
        stored_a, stored_b = homes.get(a), homes.get(b)
        if not isinstance(stored_a, Stored) or not isinstance(stored_b, Stored):
            continue
        inputs, outputs = wanted[a].shape[1], wanted[b].shape[0]
        if inputs == outputs:
            raise ModelError(
                f"{stored_a.name} was written by a peft before 0.19.1, whose inputs and outputs of experts may be "
                f"swapped, and both are {inputs}, so that shapes do not show it; write the adapters with a newer peft"
            )
        if (stored_a.shape[1:], stored_b.shape[:1]) == ((outputs,), (inputs,)):
            swapped |= {a: Swapped(stored_b, count, is_a=True), b: Swapped(stored_a, count, is_a=False)}
    return swapped
