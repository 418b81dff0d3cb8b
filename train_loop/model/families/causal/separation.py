"""Check that a model keeps packed documents and slices of a sequence apart, by numbers from a small copy of it.

No field of a config shows how a model's code uses masks and positions. Encoders attend to later tokens, some decoders
ignore position ids, and others do not count positions from 0.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train_loop.errors import ModelError
from train_loop.model.families.causal.attention import (
    attention_inputs,
    attention_replaced,
    register_attention,
    registered_attention,
)
from train_loop.model.families.causal.build import config_of, decoder_of, embeddings_of
from train_loop.model.families.causal.config import why_not_called
from train_loop.model.families.causal.embeddings import embedding_of
from train_loop.model.families.causal.heads import check_scores, measure_scores
from train_loop.model.families.causal.positions import apply_counted, apply_longrope, position_inputs
from train_loop.model.families.causal.small_copy import (
    SmallCopyError,
    compute_on_copy,
    special_tokens,
    stated_positions,
    unused_names,
)
from train_loop.spec import JobSpec

_CUT = 7
_LENGTH = 24
"""Tokens of the row of the check; a second document begins at _CUT."""
_WITHIN_WINDOWS = 1
"""Sequence length with which no window of a model matters."""
_TOLERANCE = 1e-4
"""Largest relative difference of logits from rounding in float32; other masks or positions cause much larger ones."""


class Separation(NamedTuple):
    """Properties of a model. Relative differences of logits are 0, but for rounding, if the model fits this loop."""

    later_tokens: float
    """Between a document alone and one that later tokens follow."""
    positions: float
    """Between a document called as transformers calls it, and with this loop's positions and mask."""
    documents: float
    """Between documents alone, and both in one row."""
    slices: float
    """Between slices of a row and the whole row, with the same attention."""
    takes_masks: bool = True
    """Whether the model can be called with positions and masks; if not, it is called with tokens alone."""
    scores: float = 0.0
    """Between the scores of a row by transformers' own forward pass, and those of its last token in this loop."""
    unused: frozenset[str] = frozenset()
    """Names in any layer of parameters without a gradient, such as those of an encoder beside the decoder."""


def measure_copy(model: nn.Module, sequence_length: int | None = None, **changes: Any) -> Separation:
    """Return the differences of a small copy of a model, whose config may have some changes.

    Raises ModelError if no copy can be called.
    """
    try:
        kind: Any = type(model if embedding_of(model) is None else decoder_of(config_of(model)))
        # The JSON text of transformers has objects for infinite numbers, which its config classes do not read.
        return _measure_copy(kind, json.dumps(config_of(model).to_dict() | changes), sequence_length)
    except SmallCopyError as error:
        raise ModelError(
            f"{type(model).__name__} cannot be called with this config"
            f"{why_not_called(error.__cause__, config_of(model))}; correct it, or choose another model"
        ) from error


@functools.lru_cache(maxsize=64)
def _measure_copy(kind: Any, config: str, sequence_length: int | None) -> Separation:
    return compute_on_copy(kind, json.loads(config), measure, length=sequence_length)


def position_limit(model: nn.Module, sequence_length: int | None) -> tuple[int, ...]:
    """Return the positions that a config states if sequences of a length need more, which the model does not have."""
    config = config_of(model).to_dict()
    stated = stated_positions(config)
    if stated is None or sequence_length is None or sequence_length <= stated:
        return ()
    kind: Any = type(model)
    return () if _has_more_positions(kind, json.dumps(config)) else (stated,)


@functools.lru_cache(maxsize=64)
def _has_more_positions(kind: Any, config: str) -> bool:
    try:
        compute_on_copy(kind, json.loads(config), _call_beyond_positions)
    except SmallCopyError:
        return False
    return True


def _call_beyond_positions(model: nn.Module) -> None:
    tokens = (stated_positions(config_of(model).to_dict()) or 0) + 1
    with torch.no_grad():
        _alone(model, _row(model).repeat(1, -(-tokens // _LENGTH))[:, :tokens])


def check_causal(found: Separation, model: nn.Module) -> None:
    """Raise ModelError for a model that computes other numbers in this loop than a document alone in transformers."""
    name = type(model).__name__
    if math.isnan(found.later_tokens):
        raise ModelError(
            f"{name} computes values that are not finite with this config; correct its numbers, such as rope_theta"
        )
    check_scores(found.scores, model)
    if _differs(found.later_tokens):
        change = next((one for one in _DECODERS if _fits_as_decoder(model, *one)), None)
        remedy = f"set {change[0]}: {json.dumps(change[1])} in the model's config, or " if change else ""
        raise ModelError(f"{name} attends to later tokens, so it is not a causal model; {remedy}choose another model")
    if _differs(found.positions):
        fits = not _differs(measure_copy(model, _WITHIN_WINDOWS).positions)
        remedy = "a data.sequence_length within its sliding window, or " if fits else ""
        raise ModelError(
            f"{name} is not supported: with positions from 0 and the mask of its config, its logits differ from those "
            "of transformers, which uses others (such as no sliding window); choose "
            f"{remedy}another model"
        )


_DECODERS = (("is_decoder", True), ("attn_type", "uni"))
"""Fields of encoders, and the value with which each is a decoder: of BERT and its kind, and of XLNet."""


def _fits_as_decoder(model: nn.Module, field: str, value: Any) -> bool:
    """Return whether an encoder fits this loop if its config says that it is a decoder."""
    if getattr(config_of(model), field, None) in (None, value):
        return False
    try:
        found = measure_copy(model, **{field: value})
    except ModelError:
        return False
    return not _differs(found.later_tokens) and not _differs(found.positions)


def check_packing(found: Separation, spec: JobSpec, name: str) -> None:
    """Raise ModelError if packed documents of the model called `name` would see each other."""
    if spec.data.packing and _differs(found.documents):
        raise ModelError(
            f"{name} does not keep packed documents apart: it ignores position_ids or the attention mask; set "
            "data.packing: false, or choose another model"
        )


def check_slices(found: Separation, spec: JobSpec, name: str) -> None:
    """Raise ModelError if Ulysses cannot split the sequences of the model called `name`."""
    if spec.strategy.ulysses_size > 1 and _differs(found.slices):
        raise ModelError(
            f"ulysses_size={spec.strategy.ulysses_size} cannot split a sequence of {name}: its layers use other tokens "
            "or positions outside of attention; choose ulysses_size: 1"
        )


def measure(model: nn.Module) -> Separation:
    """Return the differences of a model with weights on the CPU; infinity if a call fails."""
    row = _row(model)
    scores, unused = _or_infinity(lambda: measure_scores(model, row)), unused_names(model, _alone(model, row))
    with torch.no_grad():
        plain = _alone(model, row)
        register_attention(model)
        change = _difference(_alone(model, row), plain)
    apply_longrope(model, part=0, parts=1)
    apply_counted(model, part=0, parts=1)
    found = _measure_rows(model, row)
    return found._replace(scores=scores, unused=unused, positions=max(found.positions, change))


def _measure_rows(model: nn.Module, row: Tensor) -> Separation:
    if not _takes_masks(model, row):
        return _measure_tokens(model, row)
    second, through = _Call.of(model, row[:, _CUT:], [_LENGTH - _CUT]), _Call.of(model, row, [_LENGTH])
    apart = _Call.of(model, row, [_CUT, _LENGTH - _CUT])
    with torch.no_grad():
        first_alone, second_alone, whole = (_alone(model, one) for one in (row[:, :_CUT], row[:, _CUT:], row))
        documents = torch.cat([first_alone, second_alone], dim=1)
        return Separation(
            later_tokens=_difference(whole[:, :_CUT], first_alone),
            positions=max(_difference(second(model), second_alone), _difference(through(model), whole)),
            documents=_or_infinity(lambda: _difference(apart(model), documents)),
            slices=_or_infinity(lambda: max(_slices(model, through), _slices(model, apart))),
        )


def _takes_masks(model: nn.Module, row: Tensor) -> bool:
    try:
        with torch.no_grad():
            _Call.of(model, row, [_CUT, _LENGTH - _CUT])(model)
    except Exception:  # errors of a forward pass have no common class
        return False
    return True


def _measure_tokens(model: nn.Module, row: Tensor) -> Separation:
    """Return the differences of a model that is called with tokens alone, so that it cannot know of documents."""
    with torch.no_grad():
        difference = _difference(_alone(model, row)[:, :_CUT], _alone(model, row[:, :_CUT]))
    return Separation(difference, 0.0, math.inf, math.inf, takes_masks=False)


@dataclass(frozen=True)
class _Call:
    """A call of a model as in this loop, for a row [1, T] or a slice of it."""

    tokens: Tensor
    by_token: dict[str, Tensor]
    masks: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, tokens: Tensor, documents: Sequence[int]) -> "_Call":
        """Return the call for a row of documents of these lengths."""
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        more = position_inputs(model, tokens, positions, torch.tensor([tokens.shape[1]]))
        return cls(tokens, {"position_ids": positions} | more, attention_inputs(model, positions))

    def part(self, part: slice) -> "_Call":
        """Return the call of a Ulysses rank: a slice of the tokens, and masks of the whole row."""
        return _Call(self.tokens[:, part], {name: one[:, part] for name, one in self.by_token.items()}, self.masks)

    def __call__(self, model: nn.Module) -> Tensor:
        """Return the logits."""
        out: Tensor = model(input_ids=self.tokens, use_cache=False, **self.by_token, **self.masks).logits
        return out


class _Recorded(NamedTuple):
    """The tensors of one call of attention: queries, keys and values [1, H, T, D], mask, and output [1, T, H, D]."""

    inputs: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None
    out: Tensor


def _slices(model: nn.Module, call: _Call) -> float:
    """Return the difference between halves of a row and the whole row, if attention returns the whole row's output."""
    plain, calls = registered_attention(model), list[_Recorded]()
    differences = list[float]()

    def record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **named: Any) -> Any:
        found = plain(module, query, key, value, attention_mask, **named)
        calls.append(_Recorded((query, key, value), attention_mask, found[0]))
        return found

    with attention_replaced(model, record):
        whole = call(model)
    for part in (slice(0, _LENGTH // 2), slice(_LENGTH // 2, _LENGTH)):
        waiting = iter(calls)

        def replay(
            _: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **__: Any
        ) -> tuple[Tensor, None]:
            expected = next(waiting)  # noqa: B023  # called before the next part
            if (attention_mask is None) != (expected.mask is None):
                differences.append(float("inf"))
            for found, of_whole in zip((query, key, value), expected.inputs, strict=True):
                differences.append(_difference(found, of_whole[:, :, part]))  # noqa: B023
            return expected.out[:, part], None  # noqa: B023

        with attention_replaced(model, replay):
            differences.append(_difference(call.part(part)(model), whole[:, part]))
    return max(differences)


def _row(model: nn.Module) -> Tensor:
    """Return tokens [1, T] without special tokens, to which some models give positions of their own."""
    special = special_tokens(config_of(model).to_dict())
    plain = [token for token in range(embeddings_of(model).num_embeddings) if token not in special]
    return torch.tensor([(plain * _LENGTH)[:: max(len(plain) // _LENGTH, 1)][:_LENGTH]])


def _alone(model: nn.Module, tokens: Tensor) -> Tensor:
    out: Tensor = model(input_ids=tokens, use_cache=False).logits
    return out


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).norm() / expected.norm())


def _or_infinity(compute: Callable[[], float]) -> float:
    try:
        return compute()
    except Exception:  # errors of a forward pass have no common class
        return float("inf")


def _differs(difference: float) -> bool:
    return not difference < _TOLERANCE
