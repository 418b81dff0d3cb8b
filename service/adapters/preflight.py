"""Looks at data and model in a helper process: a hang, a crash or a gigabyte there is not ours."""

import subprocess
import sys
from collections.abc import Sequence

from pydantic import BaseModel, TypeAdapter, ValidationError

from service.errors import PreflightFailed
from service.ports import Findings
from train_loop.run_dir import Parent
from train_loop.spec import JobSpec

_COMMAND = (sys.executable, "-m", "train_loop.preflight")


class _Question(BaseModel):
    spec: JobSpec
    roots: tuple[str, ...]
    parent: Parent | None


class HelperPreflight:
    """Runs `python -m train_loop.preflight` for each spec, with a time limit in seconds."""

    def __init__(self, *, roots: Sequence[str], timeout: float, command: Sequence[str] = _COMMAND) -> None:
        self._roots = tuple(roots)
        self._timeout = timeout
        self._command = tuple(command)

    def check(self, spec: JobSpec, parent: Parent | None = None) -> Findings:
        """Everything wrong, and the model's sizes. Raises PreflightFailed when the helper does not say."""
        question = _Question(spec=spec, roots=self._roots, parent=parent).model_dump_json()
        try:
            done = subprocess.run(self._command, input=question, capture_output=True, text=True, timeout=self._timeout)
        except subprocess.TimeoutExpired as error:
            raise PreflightFailed(
                f"looking at the data and the model took over {self._timeout:g} s; check that the storage answers, "
                "or raise TRAINSHED_PREFLIGHT_SECONDS"
            ) from error
        if done.returncode:
            raise PreflightFailed(f"the data and the model could not be looked at: {_last_line(done.stderr)}")
        return _parse(done.stdout)


def _parse(answer: str) -> Findings:
    try:
        return TypeAdapter(Findings).validate_json(answer)
    except ValidationError as error:
        raise PreflightFailed(
            "the helper that looks at data and model gave no answer; see the service's log"
        ) from error


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "the helper said nothing"
