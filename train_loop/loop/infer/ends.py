"""The ends of generated rows: tokens and texts that stop a row, and its text without them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from train_loop.data.text.answer_ends import ends_of_answers
from train_loop.data.text.continuation import Continuation, Piece
from train_loop.data.text.tokenizer import TextTokenizer, load_tokenizer
from train_loop.errors import ModelError
from train_loop.model.folder import adapter_folder, model_config, model_folder
from train_loop.spec import InferJobSpec, ModelSpec
from train_loop.system.input_files import read_input


@dataclass(frozen=True)
class Ends:
    """The rule where a generated row ends."""

    tokens: frozenset[int]
    """Tokens after which a row ends."""
    texts: tuple[str, ...] = ()
    """Texts before which the text of a row ends; they may contain special tokens."""
    tokenizer: TextTokenizer | None = None
    """Tokenizer of the generated text; None if rows are token ids."""

    @classmethod
    def of(cls, spec: InferJobSpec, tokenizer: str | None) -> "Ends":
        """Return the rule of a spec, given the folder of the tokenizer of its rows, or None for rows of token ids.

        Raises DataError, ModelError.
        """
        loaded = None if tokenizer is None else load_tokenizer(tokenizer, needs_eos=False)
        chosen = spec.infer.generation.stop_tokens
        if chosen is None:
            eos = None if loaded is None else loaded.end
            chosen = stop_tokens_of(spec.model, eos)
            if tokenizer is not None and spec.model.adapter is not None:
                chosen = (*chosen, *ends_of_answers(spec.data, tokenizer))
        return cls(frozenset(chosen), spec.infer.generation.stop, loaded)

    def find(self, ids: Sequence[int], start: int) -> int | None:
        """Return the number of tokens after which a row ends, given all of its tokens; None if it has not ended.

        The first `start` tokens are known not to end it.
        """
        by_token = next((place + 1 for place in range(start, len(ids)) if ids[place] in self.tokens), None)
        if not self.texts or self._first_stop(self._pieces(ids)) is None:
            return by_token
        last = len(ids) if by_token is None else by_token
        found = (size for size in range(start + 1, last + 1) if self._first_stop(self._pieces(ids[:size])) is not None)
        return next(found, by_token)

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of a row's tokens up to its end, without special tokens and the text that stopped it.

        It begins with the space that separates its first word from the text before it.
        """
        if self.tokenizer is None:
            return None
        own = ids[:-1] if ids and ids[-1] in self.tokens else ids
        pieces = self._pieces(own) if self.texts else []
        stop, start, text = self._first_stop(pieces), 0, ""
        if stop is None:
            return self._continuation.plain(own)
        for piece in pieces:
            text += "" if piece.is_special else piece.text[: max(0, stop - start)]
            start += len(piece.text)
        return text

    def _first_stop(self, pieces: Sequence[Piece]) -> int | None:
        """Return the place of the first text that stops a row, in the text with special tokens; None without one.

        The bytes of a character that later tokens may complete do not count yet.
        """
        whole = "".join(piece.text for piece in pieces).rstrip("\N{REPLACEMENT CHARACTER}")
        return min((place for stop in self.texts if (place := whole.find(stop)) >= 0), default=None)

    def _pieces(self, ids: Sequence[int]) -> list[Piece]:
        return self._continuation.pieces(ids)

    @cached_property
    def _continuation(self) -> Continuation:
        assert self.tokenizer is not None, "the spec rejects texts that stop rows of token ids"
        return Continuation(self.tokenizer)


def stop_tokens_of(model: ModelSpec, eos: int | None) -> tuple[int, ...]:
    """Return the tokens that end an answer of a model, given its tokenizer's EOS. Raises ModelError.

    They are those of generation_config.json; without any, that of the tokenizer, or that of the model's config. A
    model that was trained further, by a job or with adapters, has learnt to end with its tokenizer's EOS, too. So has
    one whose spec names another tokenizer.
    """
    homes = [home for home in (model_folder(model), adapter_folder(model)) if home is not None]
    stated = tuple(token for home in homes for token in _listed(_generation_config(home).get("eos_token_id")))
    if model.is_of_job or model.adapter is not None or model.tokenizer is not None:
        stated += _listed(eos)
    return stated or _listed(eos) or _listed(model_config(model).get("eos_token_id"))


def _listed(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _generation_config(folder: Path) -> dict[str, Any]:
    file = folder / "generation_config.json"
    try:
        found = json.loads(read_input(file))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}; copy it again, or remove it") from error
    if not isinstance(found, dict):
        raise ModelError(f"{file} has no JSON object; copy it again, or remove it")
    return found
