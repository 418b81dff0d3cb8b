"""A small copy of a model: a config with the same rules, few heads and layers, and random weights on the CPU.

Whether a model keeps documents apart, and slices of a sequence, depends on its code. The copy shows it before a run, in
some milliseconds.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Result = TypeVar("Result")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_LAYERS = re.compile(r"(num|n)_(hidden_)?layers?|(en|de)coder_layers")
_KV_HEADS = re.compile(r"(?!linear_).*(kv|key_value|value)_heads")
_GROUPS = re.compile(r"(mamba_|ssm_)?n_groups")
"""Groups of heads of state-space layers, which share their projections."""
_WIDTHS = re.compile(r"hidden_size|(embedding|word_embed_proj)_(size|dim)|n_embd|emb_dim|d_model|.*(?<!d_)heads?")
"""Sizes that stay in proportion to the number of heads, so that the size of a head stays."""
_SHARED = "num_kv_shared_layers"
"""Number of last layers that take the keys and values of earlier ones."""
_TOKEN = re.compile(r".*_token_(id|index)")
_LIMITS = (
    (re.compile(r".*vocab_size.*"), 512),
    (_TOKEN, 511),
    (re.compile(r".*(intermediate_size|ffn_dim|ffn_hidden_size)|n_inner|d_ff"), 64),
)
_WINDOW = re.compile(
    r"(.*sliding|attention|local)_window(_size)?|window_size|local_attention|attention_chunk_size|floor_scale"
)
_EVEN_WINDOW = "attention_window"
"""Window of Longformer, which must be even."""
_POSITIONS = re.compile(r"(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_WIDTH = 32
"""Part of the hidden size that counts as a head in a model without heads."""
_MOST_WEIGHTS = 50_000_000


class SmallCopyError(Exception):
    """A config that allows no small copy, or none that can be called."""


def compute_on_copy(
    kind: type[nn.Module],
    config: dict[str, Any],
    compute: Callable[[nn.Module], Result],
    *,
    length: int | None = None,
) -> Result:
    """Return the result of a function of a small copy of a model, in evaluation mode, from its class and config.

    `length` is the sequence length of the run. Raises SmallCopyError if the function fails on copies of all sizes.
    """
    reason: Exception | None = None
    with _quiet_transformers(), _one_thread():
        for all_layers, heads in product((False, True), (2, 4)):
            try:
                return compute(_build(kind, shrink(config, heads=heads, all_layers=all_layers, length=length)))
            except Exception as error:  # neither configs nor models have a common error class
                reason = reason or error
    raise SmallCopyError(str(reason)) from reason


def unused_names(model: nn.Module, logits: Tensor) -> frozenset[str]:
    """Return the names in any layer of a copy's parameters that get no gradient from these logits in any layer."""
    torch.autograd.backward(logits.sum())
    lacks = [(_in_any_layer(name), parameter.grad is None) for name, parameter in model.named_parameters()]
    model.zero_grad()
    return frozenset(name for name, _ in lacks) - {name for name, is_none in lacks if not is_none}


def named_in_any_layer(model: nn.Module, names: frozenset[str]) -> frozenset[Tensor]:
    """Return the parameters of a model that have one of these names in any layer."""
    return frozenset(parameter for name, parameter in model.named_parameters() if _in_any_layer(name) in names)


def _in_any_layer(name: str) -> str:
    # A copy has few of the layers.
    return _NUMBER.sub("", name)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep back transformers' warnings, which it has already given for the whole model."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: several threads wait for each other longer than such small tensors take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _build(kind: Any, config: dict[str, Any]) -> nn.Module:
    """Build a model with random weights on the CPU. Raises ValueError if it is large."""
    small = kind.config_class.from_dict(config)
    attention = "sdpa" if kind._supports_sdpa else "eager"
    with torch.device("meta"):
        blueprint = kind._from_config(small, attn_implementation=attention)
    weights = sum(parameter.numel() for parameter in blueprint.parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"a copy with few layers and heads has {weights} weights; expected at most {_MOST_WEIGHTS}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = kind._from_config(small, attn_implementation=attention, dtype=torch.float32)
        if built._can_set_experts_implementation():
            # Grouped matrix products do not accept all sizes.
            built.set_experts_implementation("eager")
        return _filled(built)


def _filled(model: nn.Module) -> nn.Module:
    """Give a model weights with which every part of it matters: many models start with parts that are zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else parameter + 0.2 * noise)
    return model.eval()


def shrink(
    config: dict[str, Any], *, heads: int, all_layers: bool = False, length: int | None = None
) -> dict[str, Any]:
    """Return a config with the same rules and small sizes. Windows stay that are not shorter than `length`."""
    without = max((config.get("hidden_size") or 1) // _WIDTH, 1)
    old = next((config[name] for name in _HEADS if type(config.get(name)) is int), without)
    layers = next((value for name, value in config.items() if _LAYERS.fullmatch(str(name)) and value), 0)
    types = _kinds(config, layers)
    kept = range(layers) if all_layers else sorted({*range(min(2, layers)), *map(types.index, types)})
    sizes = _Sizes(old, heads, layers, tuple(kept), length)
    return {name: sizes.of(str(name), value) for name, value in config.items()}


def stated_positions(config: dict[str, Any]) -> int | None:
    """Return the number of positions that a config states; None if it states none."""
    fields = ((name, value) for name, value in config.items() if _POSITIONS.fullmatch(str(name)))
    return min((value for name, value in fields if type(value) is int and "original" not in name), default=None)


def _kinds(config: dict[str, Any], layers: int) -> list[tuple[Any, bool]]:
    """Return the kind of each layer: its type, and whether it takes keys and values of an earlier layer."""
    own = layers - (config.get(_SHARED) or 0)
    types = config.get("layer_types") or [None] * layers
    return [(kind, layer >= own) for layer, kind in enumerate(types)]


def special_tokens(config: dict[str, Any]) -> set[int]:
    """Return the tokens that a config names, also in its parts."""
    named = set[int]()
    for name, value in config.items():
        if isinstance(value, dict):
            named |= special_tokens(value)
        elif _TOKEN.fullmatch(str(name)):
            named |= set(value if isinstance(value, list) else [value]) - {None}
    return named


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a config before and after."""

    old_heads: int
    most_heads: int
    old_layers: int
    layers: tuple[int, ...]
    """Numbers of the layers that stay: the first two, and the first of each kind."""
    length: int | None
    """Sequence length of the run."""

    @property
    def heads(self) -> int:
        """Return the number of heads after."""
        return min(self.most_heads, self.old_heads)

    def of(self, name: str, value: Any) -> Any:
        """Return the value of a field in the smaller config."""
        if isinstance(value, dict):
            if name == "per_layer_config":
                return {place: value[str(layer)] for place, layer in enumerate(self.layers) if str(layer) in value}
            if name.startswith("rope"):
                return _fewer_positions(value)
            return shrink(value, heads=self.most_heads, length=self.length)
        if isinstance(value, list):
            if len(value) == self.old_layers and name != "architectures":
                value = [value[layer] for layer in self.layers]
            return [self._number(name, one) if type(one) is int else one for one in value]
        return self._number(name, value) if type(value) is int else value

    def _number(self, name: str, value: int) -> int:
        if name == _SHARED:
            return sum(layer >= self.old_layers - value for layer in self.layers)
        if _LAYERS.fullmatch(name):
            return min(value, len(self.layers))
        if _WINDOW.fullmatch(name):
            return self._window(value) // 2 * 2 if name == _EVEN_WINDOW else self._window(value)
        if _KV_HEADS.fullmatch(name):
            return self.heads if value == self.old_heads else max(self.heads // 2, 1) if value > 1 else 1
        if _GROUPS.fullmatch(name):
            return max(self.heads // 2, 1) if value > 1 else 1
        if _WIDTHS.fullmatch(name):
            return max(value * self.heads // self.old_heads, 1)
        if _POSITIONS.fullmatch(name):
            return _positions(value)
        return next((min(value, most) for pattern, most in _LIMITS if pattern.fullmatch(name)), value)

    def _window(self, value: int) -> int:
        # A window that holds the run's sequences must hold the row of the check.
        return _positions(value) if self.length is not None and value >= self.length else min(value, 5)


def _fewer_positions(rope: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings, which may differ by layer type, with fewer positions."""
    return {
        name: _fewer_positions(value)
        if isinstance(value, dict)
        else _positions(value)
        if _POSITIONS.fullmatch(name)
        else value
        for name, value in rope.items()
    }


def _positions(number: int) -> int:
    # More than the row of the check: rope_type=longrope has other factors beyond them.
    return min(max(number, 64), 1024)
