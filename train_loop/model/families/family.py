"""The protocol of a family: a kind of models, and the only code that knows what their library calls things.

The loop, its checks and the export work with modules, an `Anatomy` and its family.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from train_loop.errors import ModelError
from train_loop.model.families.after_head import Step
from train_loop.model.families.anatomy import Anatomy
from train_loop.plan import KeptBytes
from train_loop.spec import JobSpec, ModelSpec, RouterAuxLossSpec
from train_loop.telemetry.timers import ComputeTimer

Attention = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention function of a module: (module, query, key, value, attention_mask, ...) → (output, weights)."""

SPLIT_ATTENTION = "ulysses"
"""Attribute of a module with the `Attention` that computes in place of its family's."""

HEAD_BIAS = "head_bias"
"""Argument of an `Attention` with biases by head [H, 1, T], such as ALiBi."""


class AttentionUse(NamedTuple):
    """A module's use of attention."""

    heads: int
    kv_heads: int
    calls: int
    """Calls in a forward pass."""


class SettingCheck(NamedTuple):
    """A check whether a model supports a setting of its spec."""

    pointer: str
    """JSON pointer of the setting."""
    check: Callable[[], object]
    """Raise ModelError if it does not."""


@dataclass(frozen=True)
class Examination:
    """Properties of a model that its code shows before it has weights."""

    attention: Mapping[str, AttentionUse]
    """Modules whose attention a `SPLIT_ATTENTION` replaces, by name."""
    after_head: tuple[Step, ...] | None
    """Steps from the head's output to the logits, so that the loss can be computed inside of it; None if unknown."""
    settings: tuple[SettingCheck, ...]
    whole_scores: bool = False
    """True if attention computes whole matrices of scores."""
    sees_whole_rows: bool = False
    """True if the model is an encoder, whose bytes are those of a call: few of them have the layers of a decoder."""
    kept: Callable[[Sequence[nn.Module], Sequence[nn.Module]], KeptBytes | None] = lambda layers, tiled: None
    """Count the bytes that a call keeps for backward, given the model's layers, and their MLPs that compute in tiles.

    None if it cannot be counted.
    """
    held: Callable[[], Mapping[int, int]] = dict
    """Count the values of each parameter that one of the ranks that share layers has, by id; empty without them."""
    rotated: int | None = None
    """Positions that the config states for rotations of queries and keys; None for models without them."""
    unused: frozenset[Tensor] = frozenset()
    """Parameters that no row of text uses, so that they get no gradient."""
    prepare: Callable[[nn.Module], None] = lambda model: None
    """Prepare another copy of the model, in place, for a call without values, of the part that one of these ranks has.
    """


class Join(Protocol):
    """A tensor of a model that a folder stores as several."""

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Names of the stored tensors."""

    @property
    def by_row(self) -> bool:
        """Whether row i needs only the i-th tensor of each part, so that a rank reads only those of its rows."""

    def make(self, parts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the tensor, or some rows of it if it is made by row. Raises ModelError."""


class Rows(NamedTuple):
    """Consecutive rows of a tensor."""

    values: Tensor
    first: int
    """Number of the first row."""


class Split(Protocol):
    """A tensor of a model that the public layout stores as others, or under another name."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the stored tensors, by name."""

    @property
    def by_row(self) -> bool:
        """Whether some rows can be cut alone; otherwise all are needed at once."""

    def cut(self, rows: Tensor, first: int) -> Mapping[str, Rows]:
        """Return what is stored of rows that begin with number `first`."""


@dataclass(frozen=True)
class Unchanged:
    """A tensor that is stored as it is, under this name."""

    name: str
    shape: tuple[int, ...]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return its shape by name."""
        return {self.name: self.shape}

    @property
    def by_row(self) -> bool:
        """Return True: rows stay rows."""
        return True

    def cut(self, rows: Tensor, first: int) -> Mapping[str, Rows]:
        """Return the rows."""
        return {self.name: Rows(rows, first)}


class StoredNames(NamedTuple):
    """The names in a folder of weights as a model uses them."""

    own: Mapping[str, str]
    """The model's name of each stored tensor, by its name in the folder."""
    unused: frozenset[str]
    """Stored tensors that the model may do without: it computes them itself."""
    optional: frozenset[str]
    """Tensors of the model that a folder may lack."""
    joins: Mapping[str, Join] = MappingProxyType({})
    """The model's tensors that the folder stores as several, by the model's names."""


class SpecialTokens(NamedTuple):
    """Token ids that a tokenizer gives names to; None for a name without a token."""

    eos: int | None
    bos: int | None
    pad: int | None


@dataclass(frozen=True)
class ExportFacts:
    """Facts about exported weights that the configs beside them contain."""

    dtype: torch.dtype
    home: Path | None
    """Folder of the weights with which the run began; None for random weights."""
    tokens: SpecialTokens | None
    """Special tokens of the run's tokenizer; None if it has none."""
    ends: Sequence[int]
    """Tokens that end an answer."""


class Family(Protocol):
    """A kind of models. Its methods take models that it has built, sharded or not.

    The methods with a body are right for plain modules; a family defines the others.
    """

    @property
    def source(self) -> str:
        """Name and version of the code that its models come from, for messages."""

    @property
    def remedy_for_unset(self) -> str:
        """Return the remedy for a tensor that no rule initialises."""
        return "give a folder with weights in model.path, or choose another model"

    def build(self, spec: ModelSpec) -> Anatomy:
        """Build a model on the meta device, without memory and weights, in `spec.master_dtype`. Raises ModelError."""

    def anatomy(self, model: nn.Module) -> Anatomy:
        """Return the parts of a model, which may be a copy of a built one."""

    def examine(self, anatomy: Anatomy, spec: JobSpec) -> Examination:
        """Examine a model on the meta device. Raises ModelError if it computes other numbers in this loop.

        A plain module is not called: settings that need separate documents, attention or a known head are rejected.
        """
        return Examination({}, after_head=None, settings=plain_settings(anatomy.model, spec))

    def choose_attention(self, model: nn.Module, spec: JobSpec, device: torch.device) -> None:
        """Set the attention implementation of a spec. Raises ModelError if it cannot run on the device."""
        return

    def attention_kernel(self, model: nn.Module) -> str | None:
        """Return the implementation of attention that was chosen; None if the family has no choice."""
        return None

    def fit_positions(self, model: nn.Module, *, part: int, parts: int) -> None:
        """Make positions right on a rank that sees part number `part`, from 0, of the `parts` of a sequence."""
        return

    def divert_attention(self, model: nn.Module) -> Attention:
        """Return the function that computes a model's attention. From then on, modules look for `SPLIT_ATTENTION`."""
        raise ModelError(f"{type(model).__name__} has no attention that Ulysses can split; choose ulysses_size: 1")

    def share_layers(
        self, anatomy: Anatomy, mesh: DeviceMesh, attention: Mapping[str, AttentionUse], *, split_states: bool
    ) -> None:
        """Split the layers of a model on the meta device over the ranks of a mesh, in place; each has all tokens.

        `attention` names its attention modules, with all their heads. If `split_states` follows, projections exchange
        nothing, and gradients of norms are parts of a sum.
        """
        raise ModelError(f"{type(anatomy.model).__name__} has no plan of how ranks share its layers; choose tp_size: 1")

    def split_states(
        self, anatomy: Anatomy, mesh: DeviceMesh, attention: Mapping[str, AttentionUse], timer: ComputeTimer
    ) -> None:
        """Give each rank that shares layers a part of the tokens between projections, in place.

        The timer stops while ranks wait for each other.
        """
        raise ModelError(f"{type(anatomy.model).__name__} has no plan of layers; choose sequence_parallel: false")

    def share_experts(self, anatomy: Anatomy, mesh: DeviceMesh, tokens: DeviceMesh) -> None:
        """Split the experts of a model on the meta device over the ranks of a mesh, in place.

        The ranks of `tokens` have the same tokens.
        """
        raise ModelError(f"{type(anatomy.model).__name__} has no plan of how ranks share experts; choose ep_size: 1")

    def heads_of_rank(
        self, model: nn.Module, attention: Mapping[str, AttentionUse], ranks: int
    ) -> Mapping[str, AttentionUse]:
        """Return the heads of each attention module that a rank has if `ranks` of them share the layers."""
        return attention

    def split_sequence(self, model: nn.Module, part: object) -> bool:
        """Give a model this rank's part of each sequence, if it exchanges parts itself; return whether it does."""
        return False

    def fused_attention(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which attention only saves for backward the tensors that a GPU's kernels save."""
        return nullcontext()

    def initialise(self, model: nn.Module, name: str) -> None:
        """Initialise the tensors of one module of a model by the family's rules; tensors of others may be on meta.

        Raises ModelError if a rule fails.
        """

    def tie(self, model: nn.Module, blueprint: nn.Module) -> None:
        """Make the parameters of an allocated model one again that are one in its blueprint."""
        first, parameters = dict[int, str](), dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in blueprint.named_parameters(remove_duplicate=False):
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, parameters[first.setdefault(id(parameter), name)])

    def stored_names(self, model: nn.Module, stored: Mapping[str, tuple[int, ...]]) -> StoredNames:
        """Map the tensors of a folder, given by name and shape, to those of a model."""
        return StoredNames({name: name for name in stored}, unused=frozenset(), optional=frozenset())

    def splits(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Split]:
        """Return how the public layout stores a model's tensors, given by name and shape, if not as they are."""
        return {}

    def arguments(self, model: nn.Module, columns: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return arguments of a call that need whole sequences, such as masks, from the columns of its rows.

        Call it once per micro-batch, before the sequence is split.
        """
        return {}

    def call(self, model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Tensor:
        """Return the model's output, such as logits, for this rank's part of each sequence.

        `columns` has every column of the batch by name, such as the numbers of samples.
        """

    def caches(self, model: nn.Module, positions: int) -> bool:
        """Return whether `extend` gives the logits of calls with whole rows, which have up to `positions` tokens."""
        return False

    def prefill(
        self, model: nn.Module, columns: Mapping[str, Tensor], arguments: Mapping[str, Any], last: Tensor
    ) -> tuple[Tensor, Any]:
        """Call a model whose ranks share sequences as `call` does, and return logits and a cache for `extend`.

        The logits [n, V] are those of column `last` [n] of this rank's part of each row. Rows are padded on the right.
        """
        missing = f"{type(model).__name__} has no cache"
        raise NotImplementedError(missing)

    def extend(self, model: nn.Module, columns: Mapping[str, Tensor], cache: Any) -> tuple[Tensor, Any]:
        """Return the logits [n, V] after the last of some new columns, and the cache with them, if the model `caches`.

        `columns` has `input_ids` and `position_ids` [n, T], and `is_token` [n, K] of all K columns so far, which is 0
        at padding on the left. `cache` is None for the first call; if ranks share sequences, that is `prefill`.
        """
        missing = f"{type(model).__name__} has no cache"
        raise NotImplementedError(missing)

    def write_configs(self, model: nn.Module, folder: Path, facts: ExportFacts) -> None:
        """Write the files beside exported weights that describe the model, so that its library can load the folder."""
        return


def plain_settings(model: nn.Module, spec: JobSpec) -> tuple[SettingCheck, ...]:
    """Return checks that reject the settings of a spec which a plain module would ignore or compute wrongly."""
    name, size, kernel = type(model).__name__, spec.strategy.ulysses_size, spec.model.attn_implementation
    faults: dict[str, str | bool] = {
        "/data/packing": spec.data.packing and f"{name} does not keep packed documents apart; set data.packing: false",
        "/strategy/ulysses_size": size > 1
        and f"ulysses_size={size} needs attention that can be split by heads, which {name} lacks; "
        "choose ulysses_size: 1",
        "/strategy/tp_size": fault_without_plan(name, spec),
        "/training/chunked_loss": spec.training.chunked_loss is True
        and f"chunked_loss needs to know the steps after the head of {name}; remove chunked_loss",
        "/training/reproducible": spec.training.reproducible == "any_size"
        and f"{name} is not proven to give the same bits at every size; choose reproducible: same_size",
        "/model/attn_implementation": kernel != "auto"
        and f"attn_implementation={kernel} has no effect on {name}; remove attn_implementation",
    }
    return rejecting({**faults, **faults_without_experts(name, spec)})


def fault_without_plan(name: str, spec: JobSpec) -> str | bool:
    """Return the fault of `tp_size` for the model `name` that has no plan of how ranks share layers; false is none."""
    size = spec.strategy.tp_size
    return size > 1 and (
        f"tp_size={size} needs a plan of how ranks share layers, which {name} lacks; choose tp_size: 1"
    )


def faults_without_experts(name: str, spec: JobSpec) -> dict[str, str]:
    """Return the faults of settings of experts, by pointer, for the model `name` that has none; defaults are none."""
    training, kernel, z_loss = spec.training, spec.model.experts_implementation, spec.training.router_z_loss
    given = {
        "/model/experts_implementation": kernel != "auto" and f"experts_implementation={kernel}",
        "/model/router_dtype": spec.model.router_dtype is None and "router_dtype=null",
        "/model/router_bias_update": spec.model.router_bias_update is not None and "router_bias_update",
        "/training/router_aux_loss": training.router_aux_loss != RouterAuxLossSpec() and "router_aux_loss",
        "/training/router_z_loss": bool(z_loss) and f"router_z_loss={z_loss}",
        "/strategy/ep_size": spec.strategy.ep_size > 1 and f"ep_size={spec.strategy.ep_size}",
        "/strategy/efsdp_size": spec.strategy.efsdp_size > 0 and f"efsdp_size={spec.strategy.efsdp_size}",
    }
    return {
        pointer: f"{what} has no effect on {name}, which has no experts; remove {pointer.rpartition('/')[2]}"
        for pointer, what in given.items()
        if what
    }


def rejecting(faults: Mapping[str, str | bool]) -> tuple[SettingCheck, ...]:
    """Return checks that reject settings by pointer; false is no fault."""
    return tuple(SettingCheck(pointer, partial(_reject, str(fault))) for pointer, fault in faults.items() if fault)


def _reject(fault: str) -> None:
    raise ModelError(fault)
