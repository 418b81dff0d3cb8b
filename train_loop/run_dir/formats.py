"""The JSON files of a run directory, one model each."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FORMAT = 1
"""Of checkpoints; another number where older versions would misread one."""


class UnknownFormatError(ValueError):
    """A file that another version has written, and only such a one can read."""


class Format(BaseModel):
    """A JSON file of the run directory. Unknown fields are kept out of the way, so that versions can differ."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Stop(Format):
    """control/stop.json: what the service asks of a running attempt; answered by its outcome.

    A worker group stops by itself to `move` away from hosts that are about to be taken away.
    """

    mode: Literal["pause", "cancel", "resize", "move"]
    checkpoint: bool = True
    deadline: float | None = None
    """Unix seconds after which the service ends the attempt itself."""
    attempt: int | None = None
    """Who is asked; None: whichever attempt reads it."""

    @property
    def result(self) -> Literal["paused", "cancelled", "resized", "moved"]:
        """How an attempt ends that obeyed."""
        results: dict[str, Literal["paused", "cancelled", "resized", "moved"]]
        results = {"pause": "paused", "cancel": "cancelled", "resize": "resized", "move": "moved"}
        return results[self.mode]


@dataclass(frozen=True, order=True)
class Fence:
    """The fencing token of a worker group; in control/ the newest one, and only its group may commit.

    Tokens compare by attempt, then by epoch. Epoch 0 is an attempt that has not started a group yet.
    """

    attempt: int
    epoch: int = 0

    def __str__(self) -> str:
        return f"{self.attempt}.{self.epoch}"


NO_FENCE = Fence(0)
"""The fence of a run directory without attempts."""


class Outcome(Format):
    """attempts/<n>/outcome.json: how the driver ended, written last: the acknowledgement."""

    result: Literal["succeeded", "paused", "cancelled", "resized", "moved", "failed"]
    reason: str | None = None
    code: str | None = None
    """For `failed`: a stable word, for example data_error or worker_failure."""
    retryable: bool = False
    step: int = 0


class CheckpointFile(Format):
    """One file of a checkpoint, as it was when its save was committed."""

    size: int
    sha256: str


class DataPosition(Format):
    """Where in the data a run stands: samples taken of an epoch."""

    epoch: int = 0
    samples: int = 0


class Manifest(Format):
    """checkpoints/step-N/manifest.json: written last, it makes the directory a checkpoint."""

    format: int = FORMAT
    step: int
    tokens: int
    skipped: int = 0
    """Steps in a row, up to this one, that were not finite and changed no weight."""
    unlogged_loss: float = 0.0
    """Sum of the losses since the last metrics line that logging_steps asked for."""
    unlogged_steps: int = 0
    """Number of those losses."""
    position: DataPosition
    attempt: int
    epoch: int = 0
    """The worker group that committed it; 0 in manifests of older versions."""
    time: float
    fingerprint: str
    """SHA-256 over the spec that was trained."""
    dataset: str
    """Fingerprint of the prepared data."""
    world: int
    mesh: dict[str, int]
    versions: dict[str, str]
    metrics: dict[str, float] = {}
    """What was measured of its step, where it is finite."""
    files: dict[str, CheckpointFile]
    digest: str = ""
    """SHA-256 over all the rest: the files have the manifest to vouch for them, and it has nobody else."""

    @property
    def token(self) -> Fence:
        """The fencing token of the group that committed it."""
        return Fence(self.attempt, self.epoch)

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files.values())

    def sealed(self) -> "Manifest":
        """The same with its digest."""
        return self.model_copy(update={"digest": _digest(json.loads(self.model_dump_json()))})

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """What was sealed and written as this, by whatever version. Raises ValueError where it is damaged.

        And UnknownFormatError where only another version can read it.
        """
        written = json.loads(text)
        if not isinstance(written, dict) or written.get("digest") != _digest(written):
            raise ValueError("the manifest is not what was written")
        if written.get("format") != FORMAT:
            raise UnknownFormatError(
                f"the checkpoint of step {written.get('step')} has format {written.get('format')}, and this version of "
                f"Trainshed knows format {FORMAT}; use the version that wrote it"
            )
        return cls.model_validate(written)


class Parent(Format):
    """parent.json: the checkpoint of another run that a run goes on from until it has one of its own."""

    job: str
    run_dir: str
    manifest: Manifest
    same_order: bool
    """Whether it goes through the same data in the same order, so that it goes on where the other one stood."""
    same_optimizer: bool
    """Whether what the other one's optimizer has gathered means something to its own."""


def _digest(written: dict[str, Any]) -> str:
    """Over what stands there, known to this version or not."""
    rest = {name: value for name, value in written.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()
