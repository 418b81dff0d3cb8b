"""Where everything of a run lies, and reading and writing its JSON files."""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from train_loop.run_dir.durable import storage_path, write_durably
from train_loop.run_dir.exports import ExportDir
from train_loop.run_dir.fence import FenceStore
from train_loop.run_dir.formats import Fence, Format, Manifest, Outcome, Parent, Stop, UnknownFormatError
from train_loop.run_dir.remote import is_remote, list_folder, read_whole
from train_loop.run_dir.sinks import SinkName
from train_loop.spec import JobSpec, ScalingSpec, dump, load

T = TypeVar("T", bound=Format)
CACHE_VARIABLE = "TRAINSHED_CACHE"
"""The folder of prepared data, which the service tells drivers."""


def default_cache() -> Path:
    """The folder of prepared data for what is not beside run directories in a folder."""
    told = os.environ.get(CACHE_VARIABLE)
    return Path(told or Path(os.environ.get("TRAINSHED_HOME", "~/.trainshed")) / "runs" / "_cache").expanduser()


@dataclass(frozen=True)
class AttemptDir:
    """attempts/<n>/ of a run directory."""

    root: Path
    number: int

    @property
    def events(self) -> Path:
        """What happened, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged optimizer step."""
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
        """Folder of where each rank stood when no step had ended for failure.hang_timeout_seconds."""
        return self.root / "stacks"

    def stacks_of(self, rank: int, epoch: int) -> Path:
        """The stacks of one rank. Worker groups share no file: an old one may still write to its own."""
        group = f".group-{epoch}" if epoch > 1 else ""
        return self.stacks / f"rank-{rank:05d}{group}.txt"

    def rank_log(self, rank: int) -> Path:
        """The log of one rank."""
        return self.logs / f"rank-{rank:05d}.log"

    def profile(self, rank: int, step: int, ending: str) -> Path:
        """One file of what a rank's profiler saw of a step."""
        return self.root / "profile" / f"rank-{rank:05d}-step-{step:08d}.{ending}"

    @property
    def driver_log(self) -> Path:
        """The log of the driver: preparing data, starting and restarting workers."""
        return self.logs / "driver.log"

    @property
    def outcome_file(self) -> Path:
        """Where it is said how the attempt ended."""
        return self.root / "outcome.json"

    @property
    def size_file(self) -> Path:
        """How many workers the attempt has, where that was decided for it alone."""
        return self.root / "scaling.json"

    def write_size(self, size: ScalingSpec) -> None:
        """Say how many workers the attempt has."""
        write_durably(self.size_file, size.model_dump_json(indent=2))

    def size(self) -> ScalingSpec | None:
        """How many workers the attempt was given; None where that was not said."""
        try:
            return ScalingSpec.model_validate_json(read_whole(self.size_file))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def spec(self, spec: JobSpec) -> JobSpec:
        """The run's spec at the attempt's size."""
        size = self.size()
        return spec if size is None else spec.model_copy(update={"scaling": size})

    def outcome(self) -> Outcome | None:
        """How the attempt ended; None while it has not said so."""
        return _read(self.outcome_file, Outcome)

    def write_outcome(self, outcome: Outcome) -> None:
        """Say how the attempt ended, durably."""
        write_durably(self.outcome_file, outcome.model_dump_json(indent=2))


@dataclass(frozen=True)
class RunDir:
    """`<storage>/<project>/<job_id>/`."""

    root: Path

    @classmethod
    def at(cls, uri: str) -> "RunDir":
        """The run directory at a plain path, or at the URI of any storage that fsspec knows. Raises ValueError."""
        return cls(storage_path(uri))

    def attempt(self, number: int) -> AttemptDir:
        """One attempt's folder; it need not exist yet."""
        return AttemptDir(self.root / "attempts" / str(number), number)

    def attempts(self) -> list[AttemptDir]:
        """The attempts that have begun, oldest first."""
        numbers = [int(name) for name in list_folder(self.root / "attempts") if name.isdigit()]
        return [self.attempt(number) for number in sorted(numbers)]

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The folder of a committed checkpoint."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_in_progress(self, step: int, token: Fence) -> Path:
        """The folder into which a worker group writes a checkpoint before it is committed."""
        return self.checkpoints / f"step-{step:08d}.tmp-{token}"

    def manifests(self) -> dict[int, Manifest]:
        """Manifests of what claims to be a checkpoint, by step; whether the files still match is for a verifier."""
        found = ((step, _manifest(self.checkpoint(step) / "manifest.json")) for step in self.checkpoint_folders())
        return {step: manifest for step, manifest in found if manifest is not None and manifest.step == step}

    def manifest_in(self, folder: Path) -> Manifest | None:
        """Return the manifest in a folder of any name; None if it is missing or damaged."""
        return _manifest(folder / "manifest.json")

    def checkpoint_folders(self) -> list[int]:
        """Steps that have a folder under a checkpoint's final name, whatever lies in it."""
        matches = (re.fullmatch(r"step-(\d{8,})", name) for name in list_folder(self.checkpoints))
        return sorted(int(match[1]) for match in matches if match)

    def pins(self) -> set[int]:
        """Steps whose checkpoints somebody wants to keep; an export that has died does not any more."""
        names = (name.partition(".") for name in list_folder(self.root / "control" / "pins"))
        return {int(step) for step, _, by in names if step.isdigit() and not self._is_left(step, by)}

    def _is_left(self, step: str, by: str) -> bool:
        kind, _, wish = by.partition("-")
        return kind == "export" and not self.exports.may_be_at_work(f"step-{step}-{wish}", now=time.time())

    def pin(self, step: int, *, by: str = "user") -> bool:
        """Keep the checkpoint of a step whatever retention says; whether it was there to be kept."""
        write_durably(self._pin_file(step, by), "")
        if step in self.manifests():
            return True
        self.unpin(step, by=by)
        return False

    def unpin(self, step: int, *, by: str = "user") -> None:
        """Leave the checkpoint of a step to retention again, as far as this one is concerned."""
        self._pin_file(step, by).unlink(missing_ok=True)

    def is_pinned(self, step: int) -> bool:
        """Whether a user has pinned it."""
        return self._pin_file(step, "user").exists()

    def _pin_file(self, step: int, by: str) -> Path:
        return self.root / "control" / "pins" / f"{step:08d}.{by}"

    @property
    def exports(self) -> ExportDir:
        """What was made of checkpoints for others."""
        return ExportDir(self.root / "export")

    @property
    def cache(self) -> Path:
        """The folder of prepared data of all jobs; all workers must see it, to read samples by their place in a file.

        TRAINSHED_CACHE names it. Without it, it is `<storage>/_cache`, or in the service's home for object storage.
        """
        if os.environ.get(CACHE_VARIABLE) or is_remote(self.root):
            return default_cache()
        return self.root.parent.parent / "_cache"

    @property
    def data(self) -> Path:
        """The pointer to the prepared data, which jobs share."""
        return self.root / "data" / "dataset.json"

    @property
    def eval_data(self) -> Path:
        """The pointer to the prepared eval data, where the spec has any."""
        return self.root / "data" / "eval.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    def sink_file(self, sink: SinkName) -> Path:
        """Where it is said how far a sink has been given the run's metrics."""
        return self.root / "sinks" / f"{sink}.json"

    def spec(self) -> JobSpec:
        """The resolved spec. Raises FileNotFoundError, SpecError."""
        return load(read_whole(self.root / "spec.json"))

    def write_spec(self, spec: JobSpec) -> None:
        """Write the resolved spec, once; the same run again, if at another size, is no change.

        Raises ValueError for another run.
        """
        path = self.root / "spec.json"
        if not path.exists():
            write_durably(path, dump(spec))
            return
        before, now = (known.at_any_size().model_dump(mode="json") for known in (self.spec(), spec))
        if before != now:
            raise ValueError(
                f"{path} holds another spec ({', '.join(_changed(before, now))}); a run directory belongs to one job, "
                "choose a new one (a run goes on at another size where training.global_batch_size is given and only "
                "scaling, strategy.fsdp_size, strategy.ulysses_size and training.per_device_train_batch_size differ)"
            )

    @property
    def parent_file(self) -> Path:
        """Where it is said what the run goes on from, if it is not its own first step."""
        return self.root / "parent.json"

    def parent(self) -> Parent | None:
        """What the run goes on from until it has a checkpoint of its own; None where it begins at its first step.

        Raises ValueError where it cannot be read: nobody should take that for a run that begins anew.
        """
        try:
            return Parent.model_validate_json(read_whole(self.parent_file))
        except FileNotFoundError:
            return None

    def write_parent(self, parent: Parent) -> None:
        """Say what the run goes on from."""
        write_durably(self.parent_file, parent.model_dump_json(indent=2))

    def fence(self) -> Fence:
        """Return the token of the newest worker group; `NO_FENCE` if there was none.

        Raises ValueError if fence.json is damaged: a fence is never guessed.
        """
        return self._fence_store.read()

    def raise_fence_to(self, fence: Fence, *, by: str) -> bool:
        """Raise the fence, durably; return whether its token now belongs to `by`, which may repeat the call."""
        return self._fence_store.raise_to(fence, by=by)

    def fence_owner(self, fence: Fence) -> str | None:
        """Return who raised the fence to a token; None if nobody did."""
        return self._fence_store.owner(fence)

    def write_fence(self, attempt: int) -> None:
        """Shut out every attempt older than this one. Repeatable; it never lowers the fence."""
        self._fence_store.raise_to(Fence(attempt), by="service")

    @property
    def _fence_store(self) -> FenceStore:
        return FenceStore(self.root / "control")

    @property
    def stop_file(self) -> Path:
        """Where a stop is asked for."""
        return self.root / "control" / "stop.json"

    def stop(self, *, attempt: int | None = None) -> Stop | None:
        """What the service asks for, if anything; with an attempt, only what that one is asked."""
        stop = _read(self.stop_file, Stop)
        return None if stop is None or attempt not in (None, stop.attempt or attempt) else stop

    def write_stop(self, stop: Stop) -> None:
        """Ask the running attempt to stop at its next step."""
        write_durably(self.stop_file, stop.model_dump_json())


def _changed(before: Any, now: Any, pointer: str = "") -> Iterator[str]:
    """JSON pointers to what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            yield from _changed(before.get(name), now.get(name), f"{pointer}/{name}")
    elif before != now:
        yield pointer


def _manifest(path: Path) -> Manifest | None:
    """The manifest there; None where it is missing or damaged."""
    try:
        return Manifest.parse(read_whole(path).decode())
    except UnknownFormatError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _read(path: Path, kind: type[T]) -> T | None:
    """A JSON file of the run directory; None where it is missing or no such thing."""
    try:
        return kind.model_validate_json(read_whole(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
