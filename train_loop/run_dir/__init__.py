"""Paths and formats of a run directory: the only channel between workers and service. Torch-free.

Workers write and the service reads, except under control/, where it is the other way round. Every file has one format
here, so that neither side has to know the other.
"""

from train_loop.run_dir.durable import local_path, make_folder, replace_durably, storage_path, sync, write_durably
from train_loop.run_dir.exports import ExportDir, ExportState, ExportStatus, ExportWish
from train_loop.run_dir.formats import (
    CheckpointFile,
    DataPosition,
    Fence,
    Format,
    Manifest,
    Outcome,
    Parent,
    Stop,
    UnknownFormatError,
)
from train_loop.run_dir.lines import JsonLines, read_appended, read_lines, read_lines_after, size_appended
from train_loop.run_dir.paths import AttemptDir, RunDir
from train_loop.run_dir.remote import (
    copy_files,
    create_object,
    is_remote,
    list_folder,
    read_whole,
    remove_all,
    size_of,
    storage_failed,
    storage_may_fail,
)
from train_loop.run_dir.segments import flush_all
from train_loop.run_dir.sinks import (
    DEFAULT_SINKS,
    SINKS,
    SINKS_VARIABLE,
    SinkName,
    SinkPlace,
    format_sinks,
    parse_sinks,
    read_place,
    write_place,
)
from train_loop.run_dir.visit import (
    TOKEN_FILE,
    VISIT_MARK,
    ClusterVisit,
    NetworkVisit,
    NodeVisit,
    Sight,
    answer_file,
    versions_here,
    why_unreadable,
)

__all__ = [
    "DEFAULT_SINKS",
    "SINKS",
    "SINKS_VARIABLE",
    "TOKEN_FILE",
    "VISIT_MARK",
    "AttemptDir",
    "CheckpointFile",
    "ClusterVisit",
    "DataPosition",
    "ExportDir",
    "ExportState",
    "ExportStatus",
    "ExportWish",
    "Fence",
    "Format",
    "JsonLines",
    "Manifest",
    "NetworkVisit",
    "NodeVisit",
    "Outcome",
    "Parent",
    "RunDir",
    "Sight",
    "SinkName",
    "SinkPlace",
    "Stop",
    "UnknownFormatError",
    "answer_file",
    "copy_files",
    "create_object",
    "flush_all",
    "format_sinks",
    "is_remote",
    "list_folder",
    "local_path",
    "make_folder",
    "parse_sinks",
    "read_appended",
    "read_lines",
    "read_lines_after",
    "read_place",
    "read_whole",
    "remove_all",
    "replace_durably",
    "size_appended",
    "size_of",
    "storage_failed",
    "storage_may_fail",
    "storage_path",
    "sync",
    "versions_here",
    "why_unreadable",
    "write_durably",
    "write_place",
]
