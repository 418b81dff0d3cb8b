"""The paths of a run directory, and access to its JSON files."""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from train_loop.run_dir.exports import ExportDir
from train_loop.run_dir.fence import FenceStore
from train_loop.run_dir.files.durable import remove_below, storage_path, write_durably
from train_loop.run_dir.formats import Fence, Format, Manifest, Outcome, Parent, Stop, UnknownFormatError
from train_loop.run_dir.remote import is_remote, list_folder, read_whole, size_of
from train_loop.run_dir.results import ResultsDir
from train_loop.run_dir.root import RUN_MARKER
from train_loop.run_dir.sinks import SinkName
from train_loop.spec import AnyJobSpec, ScalingSpec, dump, load

T = TypeVar("T", bound=Format)
CACHE_VARIABLE = "TRAINSHED_CACHE"
"""Environment variable with the folder of prepared data; the service sets it for drivers."""


def default_cache() -> Path:
    """Return the folder of prepared data that TRAINSHED_CACHE names; by default, a folder in the service's home."""
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured or Path(os.environ.get("TRAINSHED_HOME", "~/.trainshed")) / "runs" / "_cache").expanduser()


@dataclass(frozen=True)
class AttemptDir:
    """The attempts/<n>/ folder of a run directory."""

    root: Path
    number: int

    @property
    def run_dir(self) -> Path:
        """The run directory of the attempt."""
        return self.root.parent.parent

    @property
    def events(self) -> Path:
        """File of the attempt's events, one JSON object per line."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """File of the attempt's metrics, one JSON object per logged optimizer step."""
        return self.root / "metrics.jsonl"

    def end_mark(self, epoch: int) -> Path:
        """Return the marker file that the first rank to report a group's failure creates."""
        return self.root / f"ended.group-{epoch}"

    @property
    def logs(self) -> Path:
        """Folder of driver.log and one log per rank."""
        return self.root / "logs"

    @property
    def stacks(self) -> Path:
        """Folder of the ranks' stack traces, written if no step ends within failure.hang_timeout_seconds."""
        return self.root / "stacks"

    def stacks_of(self, rank: int, epoch: int) -> Path:
        """Return the stack trace file of one rank. Worker groups share no file: an old group may still write."""
        group = f".group-{epoch}" if epoch > 1 else ""
        return self.stacks / f"rank-{rank:05d}{group}.txt"

    def rank_log(self, rank: int) -> Path:
        """Return the log file of one rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def profile(self, rank: int, step: int, ending: str) -> Path:
        """Return the file of one rank's profile of a step."""
        return self.root / "profile" / f"rank-{rank:05d}-step-{step:08d}.{ending}"

    @property
    def driver_log(self) -> Path:
        """The driver's log: data preparation, and starts and restarts of workers."""
        return self.logs / "driver.log"

    @property
    def outcome_file(self) -> Path:
        """File of the attempt's outcome."""
        return self.root / "outcome.json"

    @property
    def size_file(self) -> Path:
        """File of the attempt's number of workers, if it was chosen for this attempt alone."""
        return self.root / "scaling.json"

    def write_size(self, size: ScalingSpec) -> None:
        """Write the attempt's number of workers."""
        write_durably(self.size_file, size.model_dump_json(indent=2), below=self.run_dir)

    def size(self) -> ScalingSpec | None:
        """Return the attempt's number of workers; None if none was written."""
        try:
            return ScalingSpec.model_validate_json(read_whole(self.size_file, below=self.run_dir))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def spec(self, spec: AnyJobSpec) -> AnyJobSpec:
        """Return the run's spec with the attempt's number of workers."""
        size = self.size()
        return spec if size is None else spec.scaled(size)

    def outcome(self) -> Outcome | None:
        """Return the attempt's outcome; None if it is missing or invalid."""
        return _read(self.outcome_file, Outcome, below=self.run_dir)

    def write_outcome(self, outcome: Outcome) -> None:
        """Write the attempt's outcome durably."""
        write_durably(self.outcome_file, outcome.model_dump_json(indent=2), below=self.run_dir)


@dataclass(frozen=True)
class RunDir:
    """The run directory `<storage>/<project>/<job_id>/`."""

    root: Path

    @classmethod
    def at(cls, uri: str) -> "RunDir":
        """Return the run directory at a plain path or a URI that fsspec supports. Raises ValueError."""
        return cls(storage_path(uri))

    def attempt(self, number: int) -> AttemptDir:
        """Return an attempt's folder, which need not exist yet."""
        return AttemptDir(self.root / "attempts" / str(number), number)

    def attempts(self) -> list[AttemptDir]:
        """Return the attempts that have begun, oldest first."""
        numbers = [int(name) for name in list_folder(self.root / "attempts", below=self.root) if name.isdigit()]
        return [self.attempt(number) for number in sorted(numbers)]

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a committed checkpoint."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_in_progress(self, step: int, token: Fence) -> Path:
        """Return the folder into which a worker group writes a checkpoint before it is committed."""
        return self.checkpoints / f"step-{step:08d}.tmp-{token}"

    def manifests(self) -> dict[int, Manifest]:
        """Return the valid manifests by step, without a check that the checkpoints' files match them."""
        found = ((step, self.manifest_in(self.checkpoint(step))) for step in self.checkpoint_folders())
        return {step: manifest for step, manifest in found if manifest is not None and manifest.step == step}

    def manifest_in(self, folder: Path) -> Manifest | None:
        """Return the manifest in a folder of any name; None if it is missing or damaged."""
        try:
            return Manifest.parse(read_whole(folder / "manifest.json", below=self.root).decode())
        except UnknownFormatError:
            raise
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def checkpoint_folders(self) -> list[int]:
        """Return the steps that have a folder with a checkpoint's final name, whatever it contains."""
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in list_folder(self.checkpoints, below=self.root))
        return sorted(int(match[1]) for match in matches if match)

    def pins(self) -> set[int]:
        """Return the steps of pinned checkpoints. The pin of an export that has died does not count."""
        names = (name.partition(".") for name in list_folder(self.root / "control" / "pins", below=self.root))
        return {int(step) for step, _, by in names if step.isdigit() and not self._is_left(step, by)}

    def _is_left(self, step: str, by: str) -> bool:
        kind, _, wish = by.partition("-")
        return kind == "export" and not self.exports.may_be_at_work(f"step-{step}-{wish}", now=time.time())

    def pin(self, step: int, *, by: str = "user") -> bool:
        """Pin a checkpoint so that retention keeps it. Returns False, and removes the pin, if it does not exist."""
        write_durably(self._pin_file(step, by), "", below=self.root)
        if step in self.manifests():
            return True
        self.unpin(step, by=by)
        return False

    def unpin(self, step: int, *, by: str = "user") -> None:
        """Remove the pin of `by` from a checkpoint, so that retention may delete it if it has no other pins."""
        remove_below(self._pin_file(step, by), below=self.root)

    def is_pinned(self, step: int) -> bool:
        """Return whether a user has pinned the checkpoint."""
        return self._pin_file(step, "user").exists()

    def _pin_file(self, step: int, by: str) -> Path:
        return self.root / "control" / "pins" / f"{step:08d}.{by}"

    @property
    def exports(self) -> ExportDir:
        """The folder of checkpoint exports."""
        return ExportDir(self.root / "export")

    @property
    def results(self) -> ResultsDir:
        """The folder of the results of an inference job."""
        return ResultsDir(self.root / "results")

    def committed(self) -> int | None:
        """Return the newest step with a checkpoint, or the number of committed shards of results; None without both."""
        found = self.manifests()
        return max(found) if found else self.results.complete or None

    @property
    def cache(self) -> Path:
        """Folder of the prepared data of all jobs. All workers must see it, to read samples by position in a file.

        TRAINSHED_CACHE sets it. The default is `<storage>/_cache`, or a folder in the service's home for object
        storage.
        """
        if os.environ.get(CACHE_VARIABLE) or is_remote(self.root):
            return default_cache()
        return self.root.parent.parent / "_cache"

    @property
    def data(self) -> Path:
        """File with the pointer to the prepared data, which jobs share."""
        return self.root / "data" / "dataset.json"

    def tokenizer(self) -> str | None:
        """Return the folder of the tokenizer of the prepared data; None if there is none."""
        try:
            found = json.loads(read_whole(self.data, below=self.root)).get("tokenizer")
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return found if isinstance(found, str) else None

    @property
    def eval_data(self) -> Path:
        """File with the pointer to the prepared eval data, if the spec has any."""
        return self.root / "data" / "eval.json"

    @property
    def code(self) -> Path:
        """File with the run's copy of the package in its spec's `code`."""
        return self.root / "code.zip"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    def sink_file(self, sink: SinkName) -> Path:
        """Return the file with a sink's position in the run's metrics."""
        return self.root / "sinks" / f"{sink}.json"

    def exists(self) -> bool:
        """Return whether the run directory exists: it has its marker, or at least a spec."""
        return any(size_of(self.root / name, below=self.root) is not None for name in (RUN_MARKER, "spec.json"))

    def spec(self) -> AnyJobSpec:
        """Return the resolved spec. Raises FileNotFoundError or SpecError."""
        return load(read_whole(self.root / "spec.json", below=self.root))

    def write_spec(self, spec: AnyJobSpec) -> None:
        """Write the resolved spec once. A later call for the same run, even at another size, writes nothing.

        Raises ValueError for the spec of another run.
        """
        path = self.root / "spec.json"
        if not path.exists():
            write_durably(path, dump(spec), below=self.root)
            return
        before, now = (known.at_any_size().model_dump(mode="json") for known in (self.spec(), spec))
        if before != now:
            raise ValueError(
                f"{path} holds another spec ({', '.join(_changed(before, now))}); a run directory belongs to one job, "
                "choose a new one (a run can resume at another size if training.global_batch_size is set and only "
                "scaling, training.per_device_train_batch_size, and fsdp_size, ulysses_size, tp_size and ep_size of "
                "strategy differ)"
            )

    @property
    def parent_file(self) -> Path:
        """File of the checkpoint from which the run resumes, if the run does not begin at its first step."""
        return self.root / "parent.json"

    def parent(self) -> Parent | None:
        """Return the checkpoint from which the run resumes until it has its own; None if it begins at its first step.

        Raises ValueError if the file cannot be read: the run must not restart from its first step by mistake.
        """
        try:
            return Parent.model_validate_json(read_whole(self.parent_file, below=self.root))
        except FileNotFoundError:
            return None

    def write_parent(self, parent: Parent) -> None:
        """Write the checkpoint from which the run resumes."""
        write_durably(self.parent_file, parent.model_dump_json(indent=2), below=self.root)

    def fence(self) -> Fence:
        """Return the token of the newest worker group; `NO_FENCE` if there was none.

        Raises ValueError if fence.json is damaged: a fence is never guessed.
        """
        return self._fence_store.read()

    def raise_fence_to(self, fence: Fence, *, by: str) -> bool:
        """Raise the fence durably; return whether its token now belongs to `by`, which may repeat the call."""
        return self._fence_store.raise_to(fence, by=by)

    def fence_owner(self, fence: Fence) -> str | None:
        """Return the writer that raised the fence to a token; None if it is unknown."""
        return self._fence_store.owner(fence)

    def write_fence(self, attempt: int) -> None:
        """Fence off every attempt older than this one. Idempotent; it never lowers the fence."""
        self._fence_store.raise_to(Fence(attempt), by="service")

    @property
    def _fence_store(self) -> FenceStore:
        return FenceStore(self.root / "control")

    @property
    def stop_file(self) -> Path:
        """File of the stop request."""
        return self.root / "control" / "stop.json"

    def stop(self, *, attempt: int | None = None) -> Stop | None:
        """Return the service's stop request, or None; with `attempt`, only a request that applies to it."""
        stop = _read(self.stop_file, Stop, below=self.root)
        return None if stop is None or attempt not in (None, stop.attempt or attempt) else stop

    def write_stop(self, stop: Stop) -> None:
        """Ask the running attempt to stop at its next step."""
        write_durably(self.stop_file, stop.model_dump_json(), below=self.root)


def _changed(before: Any, now: Any, pointer: str = "") -> Iterator[str]:
    """Yield the JSON pointers of all differences."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changed(before.get(name), now.get(name), f"{pointer}/{name}")
    elif before != now:
        yield pointer


def _read(path: Path, kind: type[T], *, below: Path) -> T | None:
    """Return a JSON file of the run directory; None if it is missing or invalid."""
    try:
        return kind.model_validate_json(read_whole(path, below=below))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
