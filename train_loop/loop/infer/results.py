"""Results of an inference job: gathered on rank 0, and committed in Parquet files of a fixed number of rows."""

import io
import logging
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from train_loop.checkpoint.access import RunAccess
from train_loop.data.input_rows import read_input_rows
from train_loop.data.read_results import results_schema
from train_loop.liveness.fencing import check_fence
from train_loop.loop.infer.outputs import RowResult
from train_loop.run_dir import storage_failed
from train_loop.spec import InferJobSpec
from train_loop.system.retry import retry_storage

log = logging.getLogger(__name__)


def gather_results(own: list[RowResult]) -> list[RowResult]:
    """Return the results of all ranks on rank 0, and nothing on other ranks. A collective call."""
    if dist.get_world_size() == 1:
        return own
    leads = dist.get_rank() == 0
    found: list[list[RowResult]] = [[] for _ in range(dist.get_world_size())]
    dist.gather_object(own, found if leads else None, dst=0)
    return [result for results in found for result in results]


class ResultsWriter:
    """The writer of results on rank 0, which commits each shard as soon as it has all of its rows."""

    def __init__(self, spec: InferJobSpec, access: RunAccess, *, rows: int, committed: int) -> None:
        self._access = access
        self._rows, self._size, self._next = rows, spec.infer.rows_per_shard, committed
        self._results = dict[int, RowResult]()
        self._inputs = read_input_rows(spec.run, start=committed * self._size)
        self._schema = results_schema(spec)

    def add(self, results: list[RowResult]) -> None:
        """Add results of any rows, and commit the shards that are complete. Raises FencedError, storage errors."""
        self._results |= {result.row: result for result in results}
        while (numbers := self._next_rows()) and all(row in self._results for row in numbers):
            self._commit(numbers)

    def _next_rows(self) -> range:
        start = self._next * self._size
        return range(start, min(start + self._size, self._rows))

    def _commit(self, numbers: range) -> None:
        content = io.BytesIO()
        pq.write_table(self._table([self._results.pop(row) for row in numbers]), content)
        write = partial(self._write, self._next, content.getvalue())
        retry_storage(write, seconds=self._access.patience, may_pass=storage_failed)
        self._access.journal.event(
            "results_committed", shard=self._next, first_row=numbers.start, rows=len(numbers), step=numbers.stop
        )
        log.info("committed the results of rows %d to %d", numbers.start, numbers.stop - 1)
        self._next += 1

    def _write(self, number: int, content: bytes) -> None:
        check_fence(self._access.run_dir, self._access.token)
        self._access.run_dir.results.commit(number, content)

    def _table(self, results: list[RowResult]) -> pa.Table:
        """Return the rows of a shard: their ids, input columns, numbers of tokens, and outputs."""
        inputs = [next(self._inputs) for _ in results]
        rows = [
            {**own, "row": result.row, "tokens": result.tokens, **result.values}
            for own, result in zip(inputs, results, strict=True)
        ]
        # Sources may have different columns.
        columns = [pa.array([row.get(column.name) for row in rows], column.type) for column in self._schema]
        return pa.table(columns, self._schema)
