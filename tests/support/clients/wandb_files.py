"""Offline runs of Weights & Biases, read from their files."""

import importlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MAGIC = b":W&B"
_BLOCK, _HEAD = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass
class OfflineRun:
    """The content of one run file."""

    id: str = ""
    project: str = ""
    name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)
    """For each glob of metrics, the metric on the x axis."""


def read_runs(folder: Path) -> list[OfflineRun]:
    """Return the runs below a folder, oldest first."""
    return [_read(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(file: Path) -> OfflineRun:
    run = OfflineRun()
    # Imported here only: collecting the tests would take seconds longer.
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for content in _records(file.read_bytes()):
        record = messages.Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.id, run.project, run.name = record.run.run_id, record.run.project, record.run.display_name
            run.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            run.history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
        elif kind == "metric" and record.metric.glob_name:
            run.axes[record.metric.glob_name] = record.metric.step_metric
    return run


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of records, with long records in parts."""
    assert content.startswith(_MAGIC)
    place, parts = _HEAD, b""
    while place + _HEAD <= len(content):
        if (left := _BLOCK - place % _BLOCK) < _HEAD:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + _HEAD])
        part = content[place + _HEAD : place + _HEAD + length]
        parts = part if kind in (_FULL, _FIRST) else parts + part
        place += _HEAD + length
        if kind in (_FULL, _LAST):
            yield parts
