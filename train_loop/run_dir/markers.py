"""Creation of the marker files that prove that a storage root is mounted."""

import errno
import os
import secrets
from pathlib import Path

from train_loop.run_dir.files.durable import sync, whole_or_none, write_durably, write_synced
from train_loop.run_dir.remote import create_object, is_remote, list_folder, read_whole
from train_loop.run_dir.root import ROOT_MARKER, RUN_MARKER, RootMarker, read_root_marker


def write_run_marker(run_dir: Path, marker: RootMarker) -> None:
    """Write the id of the storage root into a run directory, unless it is already there."""
    path, content = run_dir / RUN_MARKER, marker.model_dump_json()
    if list_folder(run_dir, below=run_dir).count(RUN_MARKER) and read_whole(path, below=run_dir) == content.encode():
        return
    write_durably(path, content, below=run_dir)


def create_root_marker(root: Path) -> RootMarker:
    """Create the marker of an existing root, or return the marker that another process created first."""
    marker = RootMarker.new()
    path, content = root / ROOT_MARKER, marker.model_dump_json().encode()
    try:
        if is_remote(path):
            create_object(path, content)
        else:
            _create_file(path, content)
    except FileExistsError:
        found = read_root_marker(root)
        if found is None:
            raise
        return found
    return marker


def _create_file(path: Path, content: bytes) -> None:
    """Write a new file so that readers see all of it or nothing. Raises FileExistsError."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with whole_or_none(temporary, as_of=path):
        write_synced(temporary.open("xb"), content)
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # The file system has no hard links: two services that start at the same instant may both write.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
