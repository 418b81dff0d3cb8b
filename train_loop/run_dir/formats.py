"""The JSON files of a run directory, one model each."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT = 1
"""Version of the checkpoint format; increased if older versions would misread a newer checkpoint."""
_READ = 2
"""Number of the newest formats that can be read."""


class UnknownFormatError(ValueError):
    """A file written by another version, in a format that this version cannot read."""


class Format(BaseModel):
    """A JSON file of the run directory. Unknown fields are ignored, so that versions can differ."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Stop(Format):
    """control/stop.json: a stop request from the service to a running attempt, which answers with its outcome.

    A worker group requests `move` itself, to leave hosts that are about to be taken away. A head that is about to end
    requests `pause`, with a reason.
    """

    mode: Literal["pause", "cancel", "resize", "move"]
    checkpoint: bool = True
    deadline: float | None = None
    """Unix seconds after which the service ends the attempt itself."""
    attempt: int | None = None
    """Number of the attempt to stop; None means any attempt that reads the file."""
    reason: str | None = None
    """Cause, if the head of Ray requests the stop; the job then continues in a new attempt."""

    @property
    def result(self) -> Literal["paused", "cancelled", "resized", "moved"]:
        """The outcome's result if the attempt obeys this request."""
        results: dict[str, Literal["paused", "cancelled", "resized", "moved"]]
        results = {"pause": "paused", "cancel": "cancelled", "resize": "resized", "move": "moved"}
        return results[self.mode]


@dataclass(frozen=True, order=True)
class Fence:
    """The fencing token of a worker group. Only the group with the newest token in control/ may commit.

    Tokens compare by attempt, then by epoch. Epoch 0 means that the attempt has not started a group yet.
    """

    attempt: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}.{self.epoch}"


NO_FENCE = Fence(0)
"""The fence of a run directory without attempts."""


STARTED = frozenset({"training_started", "work_started"})
"""Events that report that the ranks begin: to train, or with the work of another kind of job."""
ENDED = frozenset({"training_ended", "work_ended"})
"""Events that report how that has ended."""


class Outcome(Format):
    """attempts/<n>/outcome.json: the driver's result, written last as its acknowledgement."""

    result: Literal["succeeded", "paused", "cancelled", "resized", "moved", "failed"]
    reason: str | None = None
    code: str | None = None
    """Stable error code if the result is `failed`, for example data_error or worker_failure."""
    retryable: bool = False
    step: int = 0


class CheckpointFile(Format):
    """Size and hash of a checkpoint file when its save was committed."""

    size: int
    sha256: str


class DataPosition(Format):
    """Position of a run in its data: the epoch, and the samples taken from it."""

    epoch: int = 0
    samples: int = 0


class BaseWeights(Format):
    """The frozen weights below adapters, which a checkpoint names and does not contain."""

    path: str | None
    """Folder of the model; None for random weights."""
    sha256: str
    """SHA-256 of the folder's config and weights, and of weights that were drawn."""
    quantized: str | None = None
    """`model.quantize_base`: how linear layers are stored, which changes their values."""


class Manifest(Format):
    """checkpoints/step-N/manifest.json: written last, it makes the directory a checkpoint."""

    format: int = FORMAT
    step: int
    tokens: int
    skipped: int = 0
    """Consecutive steps, up to this one, that were not finite and changed no weights."""
    unlogged_loss: float = 0.0
    """Sum of the losses since the last metrics line that logging_steps asked for."""
    unlogged_steps: int = 0
    """Number of the losses in `unlogged_loss`."""
    unlogged_line: dict[str, Any] = {}
    """Metrics line of its step, if a stop request has interrupted the step's evaluation; else empty."""
    position: DataPosition
    attempt: int
    epoch: int = 0
    """Epoch of the worker group that committed it; 0 in manifests of older versions."""
    time: float
    fingerprint: str
    """SHA-256 of the spec that was trained."""
    dataset: str
    """Fingerprint of the prepared data."""
    world: int
    mesh: dict[str, int]
    versions: dict[str, str]
    metrics: dict[str, float] = {}
    """Metrics of its step that are finite."""
    base: BaseWeights | None = None
    """The frozen weights that its adapters belong to; None if it has all weights."""
    files: dict[str, CheckpointFile]
    digest: str = ""
    """SHA-256 of all other fields. The manifest protects the files; only this digest protects the manifest."""

    @property
    def token(self) -> Fence:
        """The fencing token of the group that committed it."""
        return Fence(self.attempt, self.epoch)

    @property
    def bytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    def other_torch(self, now: str | None) -> str | None:
        """Return a warning if another version of torch wrote it than the one that will read it; None if unknown."""
        then = self.versions.get("torch")
        if then is None or now is None or then == now:
            return None
        return (
            f"the checkpoint of step {self.step} was written with torch {then}, and torch {now} goes on from it: "
            "results may differ in the last bits"
        )

    def sealed(self) -> "Manifest":
        """Return a copy with its digest set."""
        return self.model_copy(update={"digest": _digest(json.loads(self.model_dump_json()))})

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Parse a sealed manifest of any version.

        Raises ValueError if it is damaged, and UnknownFormatError if only another version can read it.
        """
        try:
            written = json.loads(text)
            sealed = isinstance(written, dict) and written.get("digest") == _digest(written)
        except RecursionError as error:
            raise ValueError("the manifest is nested too deeply to be read") from error
        if not sealed:
            raise ValueError("the manifest does not match its digest")
        check_format(written.get("format"), f"the checkpoint of step {written.get('step')}")
        return cls.model_validate(written)


class Parent(Format):
    """parent.json: the checkpoint of another run from which a run resumes until it has its own."""

    job: str
    run_dir: str
    manifest: Manifest
    same_order: bool
    """True if both runs read the same data in the same order; the run then resumes at the parent's position."""
    same_optimizer: bool
    """True if the parent's optimizer state fits this run's optimizer."""
    same_plateau: bool = False
    """True if both runs lower the same learning rate after the same evaluations; the run then has the parent's rate."""


def check_format(number: object, what: str) -> None:
    """Raise UnknownFormatError unless a number is one of the formats that this version reads: the last two."""
    oldest = max(FORMAT - _READ + 1, 1)
    if type(number) is int and oldest <= number <= FORMAT:
        return
    newer = type(number) is int and number > FORMAT
    formats = f"format {FORMAT}" if oldest == FORMAT else f"formats {oldest} to {FORMAT}"
    raise UnknownFormatError(
        f"{what} has format {number}, but this version of Trainshed reads {formats}; "
        f"{'update to the version that wrote it' if newer else 'use the version that wrote it, and export the weights'}"
    )


def _digest(written: dict[str, Any]) -> str:
    """Return the SHA-256 of all other fields, including fields that this version does not know."""
    rest = {name: value for name, value in written.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()
