"""Paths and formats of a run directory: the only channel between workers and service. Torch-free.

Workers write and the service reads, except under control/, where it is the other way round. Every file has one format
here, so that neither side has to know the other.
"""

from train_loop.run_dir.durable import local_path, make_folder, replace_durably, sync, write_durably
from train_loop.run_dir.exports import ExportDir, ExportState, ExportStatus, ExportWish
from train_loop.run_dir.formats import CheckpointFile, DataPosition, Fence, Format, Manifest, Outcome, Stop
from train_loop.run_dir.lines import JsonLines, read_lines
from train_loop.run_dir.paths import AttemptDir, RunDir

__all__ = [
    "AttemptDir",
    "CheckpointFile",
    "DataPosition",
    "ExportDir",
    "ExportState",
    "ExportStatus",
    "ExportWish",
    "Fence",
    "Format",
    "JsonLines",
    "Manifest",
    "Outcome",
    "RunDir",
    "Stop",
    "local_path",
    "make_folder",
    "read_lines",
    "replace_durably",
    "sync",
    "write_durably",
]
