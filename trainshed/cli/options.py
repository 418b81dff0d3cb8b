"""Arguments and options that commands share, and reading of spec files and their overrides."""

import json
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from train_loop.spec import SpecError, check_mapping, merged, read_yaml
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.ids import LAST, complete_job
from trainshed.cli.spec_text import SpecText

M = TypeVar("M", bound=BaseModel)
JOB_HELP = f"a job's id, or enough of its beginning; `{LAST}` is the newest one"
_MOST_BYTES = 16 << 20
_HEADER = re.compile("[!-~]([ -~]{0,253}[!-~])?")
SpecFile = Annotated[Path, typer.Argument(help="job spec in YAML or JSON; - reads standard input", allow_dash=True)]
JobRef = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=complete_job)]
JobRefs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB]...", help=JOB_HELP, autocompletion=complete_job, show_default=False),
]
Step = Annotated[int, typer.Argument(help="step of a checkpoint, from `trainshed checkpoints`", min=0)]
AsJson = Annotated[bool, typer.Option("--json", help="print the response as one JSON document")]
AsJsonLines = Annotated[
    bool, typer.Option("--json", help="print JSON: one document, or one line per entry with --follow")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="override a spec field; VALUE is YAML"),
]
After = Annotated[str | None, typer.Option(metavar="CURSOR", help="`next` of the previous page")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="maximum number of lines (ignored with --follow)")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="stream until the job ends")]
Wait = Annotated[bool, typer.Option("--wait", help="wait for the job to end; exit with 3 if it does not succeed")]


def _header(value: str | None) -> str | None:
    """Return the value. Raises BadParameter if it cannot be sent as a header."""
    if value is not None and not _HEADER.fullmatch(value):
        raise typer.BadParameter("write 1 to 255 characters of printable ASCII")
    return value


IdempotencyOption = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key", metavar="KEY", callback=_header, help="key that makes a repeated call return the same job"
    ),
]
Grace = Annotated[
    float | None, typer.Option(min=0, max=86400, metavar="SECONDS", help="seconds to wait before the job is killed")
]


def read_spec(file: Path, overrides: Sequence[str]) -> tuple[bytes, SpecText]:
    """Read a spec. Return the request body, with its overrides applied, and the text for errors.

    Exits with a one-line error and code 2 if either is invalid.
    """
    spec = SpecText("<stdin>" if str(file) == "-" else str(file), read_file(file, "job spec"), overrides)
    return (_overridden(spec) if overrides else spec.text), spec


def _overridden(spec: SpecText) -> bytes:
    try:
        data = check_mapping(read_yaml(spec.text))
        return json.dumps(merged(data, read_overrides(spec.overrides)), allow_nan=False).encode()
    except SpecError as error:
        located = [one for one in error.problems if one.line is not None]
        fail(spec.error(located[0]) if located else f"{spec.name}: {error}", code=Exit.USAGE)
    except (TypeError, ValueError) as error:
        fail(f"{spec.name}: {error}", code=Exit.USAGE)


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Merge overrides into one mapping; values are YAML. Exits with a one-line error and code 2 if one is invalid."""
    whole: dict[str, Any] = {}
    for override in overrides:
        place, equals, value = override.partition("=")
        *above, name = place.split(".")
        part = whole
        for step in above:
            part = part.setdefault(step, {})
            if not isinstance(part, dict):
                fail(f"{override!r} is below a value that another --set sets", code=Exit.USAGE)
        if not equals or not all((*above, name)):
            fail(f"invalid override {override!r}; expected e.g. --set training.max_steps=200", code=Exit.USAGE)
        try:
            part[name] = read_yaml(value)
        except SpecError as error:
            fail(f"{override!r}: {error}", code=Exit.USAGE)
    return whole


def read_pairs(pairs: Sequence[str], option: str) -> dict[str, str]:
    """Parse `K=V` pairs into a mapping. Exits with a one-line error and code 2 if one is invalid."""
    split = [pair.partition("=") for pair in pairs]
    for pair, (key, equals, _) in zip(pairs, split, strict=True):
        if not key or not equals:
            fail(f"invalid value {pair!r}; expected {option} key=value", code=Exit.USAGE)
    return {key: value for key, _, value in split}


def checked(model: type[M], given: Mapping[str, object], remedy: str) -> M:
    """Validate options as a model. Exits with a one-line error and code 2 if they are invalid."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]
        place = "/".join(str(step) for step in problem["loc"] if step != "[key]")
        fail(f"{place}: {problem['msg'].removeprefix('Value error, ')}; {remedy}", code=Exit.USAGE)


def write_file(file: Path, content: bytes) -> None:
    """Write a file. Exits with a one-line error and code 2 if it cannot be written."""
    try:
        file.write_bytes(content)
    except OSError as error:
        fail(f"{file}: {error.strerror}; name a writable file in an existing folder", code=Exit.USAGE)


def read_file(file: Path, kind: str, *, regular: bool = False) -> bytes:
    """Read a file, or standard input for `-`. Exits with a one-line error and code 2 if it cannot be read.

    A file of more than 16 MiB is an error, such as a device without end; with `regular`, so is a FIFO or a device.
    """
    try:
        if str(file) == "-":
            content = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            # Without O_NONBLOCK, the open of a FIFO would wait for its writer.
            with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK * regular)) as opened:
                if regular and not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                    fail(f"{file} is not a regular file; name a readable {kind}, or - to read stdin", code=Exit.USAGE)
                content = opened.read(_MOST_BYTES + 1)
    except OSError as error:
        fail(f"{file}: {error.strerror}; name a readable {kind}", code=Exit.USAGE)
    if len(content) > _MOST_BYTES:
        fail(f"{file} is larger than {_MOST_BYTES >> 20} MiB; name a smaller {kind}", code=Exit.USAGE)
    return content
