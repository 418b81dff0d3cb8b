"""Description of a run for trackers: its id, name, project and spec."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from train_loop.run_dir import RunDir
from train_loop.system.redact import redactor

_JOB_ID = re.compile(r"job-[0-9a-z]{26}")
_NOT_IN_IDS = re.compile(r"[^0-9A-Za-z_.-]")


@dataclass(frozen=True)
class Description:
    """A run's unique id, its name, its project, and its spec without secrets from the environment."""

    id: str
    name: str
    project: str
    spec: Mapping[str, JsonValue]

    @classmethod
    def of(cls, run_dir: RunDir) -> "Description":
        """Return the description of the run in a directory. Raises FileNotFoundError, SpecError."""
        spec = run_dir.spec()
        raw = spec.model_dump(mode="json")
        masked = {name: _masked(value, redactor()) for name, value in raw.items()}
        return cls(_id(run_dir), spec.name, spec.project, masked)

    def flat(self) -> dict[str, str]:
        """Return the spec by dotted names, such as model.config.hidden_size, without null values."""
        return dict(_flat(self.spec, ""))


def _id(run_dir: RunDir) -> str:
    """Return the job's id; for a run without a service, the folder's name and a hash of its path."""
    name = run_dir.root.name
    if _JOB_ID.fullmatch(name):
        return name
    place = hashlib.sha256(str(run_dir.root).encode()).hexdigest()[:12]
    return f"{_NOT_IN_IDS.sub('-', name)[:64]}-{place}"


def _masked(value: Any, mask: Callable[[str], str]) -> JsonValue:
    if isinstance(value, dict):
        return {name: _masked(part, mask) for name, part in value.items()}
    if isinstance(value, list):
        return [_masked(part, mask) for part in value]
    return mask(value) if isinstance(value, str) else value


def _flat(value: JsonValue | Mapping[str, JsonValue], name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else key)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)
