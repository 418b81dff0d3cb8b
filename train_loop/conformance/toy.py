"""Toy jobs of a user's package: its own model and loss on the first rows of its data, on small meshes of CPU ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train_loop.data.files import open_file, report_damage
from train_loop.data.prepare.sources import list_files
from train_loop.errors import DataError
from train_loop.spec import SCHEDULE_FREE, BudgetSpec, JobSpec, parse

ROWS, BATCH, STEPS, EVERY = 24, 8, 4, 2
"""Rows, rows of a step, optimizer steps of a run, and steps between its checkpoints."""

_TRAINING = {"learning_rate", "optimizer", "weight_decay", "momentum", "groups", "layer_decay", "seed", "max_grad_norm"}
"""Fields of a spec's training that its toy jobs have, too."""


@dataclass(frozen=True)
class ToyMesh:
    """A small mesh. All of them take the same rows in a step."""

    world: int = 1
    fsdp: int = 0
    sp: int = 1
    accumulation: int = 1

    @property
    def micro_batch(self) -> int:
        """Return the rows of a micro-batch."""
        return BATCH // (self.world // self.sp * self.accumulation)


def toy_job(spec: JobSpec, mesh: ToyMesh, rows: Path) -> JobSpec:
    """Return a short job on a mesh with the code, units and optimizer of a spec, in float32. Raises SpecError."""
    assert spec.code is not None, "only own code has toy jobs"
    training, strategy = spec.training, spec.strategy
    raw: dict[str, Any] = {
        "name": "toy",
        "code": spec.code.model_dump(mode="json"),
        "model": {"dtype": "fp32"}
        | spec.model.model_dump(mode="json", include={"gradient_checkpointing", "freeze_module_prefix"})
        # Toy jobs are not compiled.
        | ({"gradient_checkpointing": "none"} if isinstance(spec.model.gradient_checkpointing, BudgetSpec) else {}),
        "data": {"train": {"path": str(rows)}, "columns": {"own": [*spec.data.columns_of(spec.data.sources[0]).own]}},
        "training": training.model_dump(mode="json", include=_TRAINING, exclude_none=True)
        | ({"optimizer": "adamw"} if training.optimizer == "adamw_8bit" else {})
        | ({"lr_scheduler_type": "constant"} if training.optimizer == SCHEDULE_FREE else {})
        | {"max_steps": STEPS, "global_batch_size": BATCH, "per_device_train_batch_size": mesh.micro_batch},
        "strategy": {
            "fsdp_size": mesh.fsdp,
            "ulysses_size": mesh.sp,
            "wrap_policy": strategy.wrap_policy.model_dump(mode="json"),
            "reshard_after_forward": strategy.reshard_after_forward
            if isinstance(strategy.reshard_after_forward, bool)
            else None,
            "async_save_ckpt": False,
        },
        "checkpoint": {"every_steps": EVERY},
        "scaling": {"num_workers": mesh.world},
    }
    return parse(raw)


def write_rows(spec: JobSpec, folder: Path) -> Path:
    """Write the first rows of a spec's training data, repeated if they are few, to a file. Raises DataError."""
    source = spec.data.sources[0]
    columns, tables, missing = [*spec.data.columns_of(source).own], list[pa.Table](), ROWS
    for file in list_files(source):
        with report_damage(file.uri, file.format), open_file(file, buffer=0) as opened:
            for batch in pq.ParquetFile(opened).iter_batches(batch_size=missing, columns=columns):
                tables.append(pa.Table.from_batches([batch.slice(0, missing)]))
                missing -= tables[-1].num_rows
                if not missing:
                    break
        if not missing:
            break
    found = pa.concat_tables(tables) if tables else None
    if not found:
        raise DataError(f"{', '.join(source.paths)} holds no rows; an empty dataset cannot be trained on")
    repeated = pa.concat_tables([found] * -(-ROWS // found.num_rows)).slice(0, ROWS)
    pq.write_table(repeated, folder / "rows.parquet")
    return folder / "rows.parquet"
