"""`output: generate`: tokens after each row, until it ends. n: rows, G: generated tokens, V: vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train_loop.data.order import PADDING
from train_loop.loop.batch import MicroBatch
from train_loop.loop.infer.calls import calls_of
from train_loop.loop.infer.ends import Ends
from train_loop.loop.infer.outputs import AnyBusy, RowResult, rows_of
from train_loop.loop.infer.sampling import choose_tokens
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.mesh import Mesh
from train_loop.spec import GenerationSpec

AGREE_EVERY = 8
"""Tokens between two agreements of all ranks whether a row has not ended. Tokens after a row's end are dropped."""


@dataclass(frozen=True)
class Generate:
    """The tokens that a model writes after each row."""

    spec: GenerationSpec
    ends: Ends
    cached: bool
    """Whether earlier tokens are cached; if not, each token needs a call with whole rows."""

    def __call__(self, anatomy: Anatomy, batch: MicroBatch, mesh: Mesh, any_busy: AnyBusy) -> list[RowResult]:
        """Generate until each row of all ranks has ended. Ranks whose rows have ended compute until the others end."""
        calls = calls_of(anatomy, batch, mesh, cached=self.cached)
        rows, logits = _Rows(self, batch), calls.begin()
        while True:
            tokens = rows.add(logits)
            if rows.is_due and not any_busy(rows.examine()):
                return rows.results()
            logits = calls.add(tokens)


class _Rows:
    """The generated tokens of a batch."""

    def __init__(self, output: Generate, batch: MicroBatch) -> None:
        self._output, self._batch = output, batch
        self._tokens, self._logprobs = list[Tensor](), list[Tensor]()
        """Tokens [n] of each call, and their log probabilities."""
        self._ids: list[list[int]] = [[] for _ in batch.samples]
        """Tokens of each row up to its end, as far as the rows were examined."""
        self._ended = [row == PADDING for row in batch.samples.tolist()]
        self._stopped = [False] * len(self._ended)
        self._examined = 0

    def add(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row, and return them [n]."""
        spec = self._output.spec
        tokens = choose_tokens(logits, spec, self._batch.samples, len(self._tokens))
        self._tokens.append(tokens)
        if spec.logprobs:
            self._logprobs.append(logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0])
        return tokens

    @property
    def is_due(self) -> bool:
        """Whether ranks have to agree: after some tokens, and after the last."""
        return len(self._tokens) % AGREE_EVERY == 0 or len(self._tokens) == self._output.spec.max_new_tokens

    def examine(self) -> bool:
        """Find the ends of rows among the new tokens, and return whether one has not ended."""
        new = torch.stack(self._tokens[self._examined :], 1).tolist()
        for place, ids in enumerate(new):
            if not self._ended[place]:
                whole = self._ids[place] + ids
                end = self._output.ends.find(whole, self._examined)
                self._ids[place] = whole[:end]
                self._ended[place] = self._stopped[place] = end is not None
        self._examined = len(self._tokens)
        return self._examined < self._output.spec.max_new_tokens and not all(self._ended)

    def results(self) -> list[RowResult]:
        """Return the results of all rows that are not padding."""
        values: dict[str, list[Any]] = {
            "generated": [self._output.ends.text(ids) for ids in self._ids],
            "generated_tokens": self._ids,
            "finish_reason": ["stop" if one else "length" for one in self._stopped],
        }
        if self._logprobs:
            found = torch.stack(self._logprobs, 1).cpu().numpy()
            values["generated_logprobs"] = [found[place, : len(ids)] for place, ids in enumerate(self._ids)]
        return [
            RowResult(row, size, {name: of_rows[place] for name, of_rows in values.items()})
            for place, row, size in rows_of(self._batch)
        ]
