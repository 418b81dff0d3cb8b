"""The text of tokens that continue other text, such as the output of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from train_loop.data.text.tokenizer import TextTokenizer

_PROBES = ("a", "e", "1", ".")
"""Texts, of which the tokens of one are put before tokens to decode."""


class Piece(NamedTuple):
    """The text of consecutive tokens that all are special, or all are not."""

    text: str
    is_special: bool


@dataclass(frozen=True)
class Continuation:
    """The text of tokens after others.

    Decoders of SentencePiece remove the space before the first word of a text. Here it stays, so that the text can be
    joined to the one that it continues.
    """

    tokenizer: TextTokenizer

    def plain(self, ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return self._after([token for token in ids if token not in self._special])

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """Return the texts of token ids, whose concatenation is their text with special tokens."""
        runs = groupby(ids, self._special.__contains__)
        return [Piece(self._after(list(run)), is_special) for is_special, run in runs]

    def _after(self, ids: list[int]) -> str:
        before, text = self._before
        whole = self.tokenizer.decode([*before, *ids], special=True)
        return whole.removeprefix(text) if whole.startswith(text) else self.tokenizer.decode(ids, special=True)

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """Plain tokens to put before others, and their text; none if the tokenizer has no such tokens."""
        for probe in _PROBES:
            ids, _ = self.tokenizer.encode_with_offsets(probe)
            names = [str(self.tokenizer.tokenizer.id_to_token(token)) for token in ids]
            # A decoder puts bytes together with those that follow them.
            if (
                (text := self.tokenizer.decode(ids, special=True))
                and self._special.isdisjoint(ids)
                and not any("<0x" in one for one in names)
            ):
                return ids, text
        return [], ""

    @cached_property
    def _special(self) -> frozenset[int]:
        # The library's own flag of a token is not always what it decodes by.
        return frozenset(token for token in self.tokenizer.added_tokens if not self.tokenizer.decode([token]))
