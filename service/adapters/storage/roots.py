"""Storage roots of the service: created once, with a marker, and never recreated."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from train_loop.run_dir import (
    RootMarker,
    StorageUnavailable,
    check_storage,
    create_root_marker,
    expect_root,
    is_remote,
    list_folder,
    make_folder,
    read_root_marker,
    storage_path,
    write_durably,
)


def _never(root: str) -> bool:
    return False


class StorageRoots:
    """The storage roots that this service has used, by URI, with the ids of their markers.

    `memory` is the file that keeps them across restarts. `used` returns whether jobs of the database have run below a
    root. Such a root is never created, only adopted if it is not empty.
    """

    def __init__(self, memory: Path | None = None, *, used: Callable[[str], bool] = _never) -> None:
        self._memory = memory
        self._used = used
        self._lock = threading.Lock()
        self._ids = self._recall()

    def check(self, root: str, *, max_age: float | None = None) -> None:
        """Raise StorageUnavailable if a known root is missing or was replaced. A new root passes.

        `max_age` in seconds is the argument of `check_storage`.
        """
        place = storage_path(root)
        if root not in self._ids:
            marker = read_root_marker(place)
            if marker is None:
                return
            self._remember(root, marker)
        expect_root(place, self._ids[root])
        check_storage(place, max_age=max_age)

    def open(self, root: str) -> RootMarker:
        """Return the marker of a root. Create both at first use. Raises StorageUnavailable, OSError."""
        place = storage_path(root)
        if root in self._ids:
            self.check(root)
            return RootMarker(id=self._ids[root])
        marker = read_root_marker(place)
        if marker is None:
            marker = self._begin(root, place)
        self._remember(root, marker)
        expect_root(place, marker.id)
        return marker

    def _begin(self, root: str, place: Path) -> RootMarker:
        if self._used(root) and not list_folder(place):
            raise StorageUnavailable(root, "it is empty, but jobs of this service have run there")
        if not is_remote(place):
            make_folder(place)
        return create_root_marker(place)

    def _recall(self) -> dict[str, str]:
        if self._memory is None or not self._memory.exists():
            return {}
        known: dict[str, str] = json.loads(self._memory.read_text())
        return known

    def _remember(self, root: str, marker: RootMarker) -> None:
        with self._lock:
            self._ids[root] = marker.id
            if self._memory is not None:
                write_durably(self._memory, json.dumps(self._ids, indent=2))


def root_of(run_dir: str) -> str:
    """Return the storage root of a run directory: `<root>/<project>/<job id>`."""
    return run_dir.rstrip("/").rsplit("/", 2)[0]
