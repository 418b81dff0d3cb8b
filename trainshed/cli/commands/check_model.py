"""`trainshed check-model`: the guarantees of a package with own code, measured on this machine."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import typer
from rich.text import Text

from train_loop.conformance.finding import Finding, Findings
from train_loop.extras import install
from train_loop.spec import JobSpec, SpecError, parse_text, show
from trainshed.cli.exit_codes import Exit, fail
from trainshed.cli.options import AsJson, Overrides, SpecFile, read_spec
from trainshed.cli.output.printing import console, notes, show_json, show_next, show_text

_LAST_LINES = 15
_COLOURS = {"holds": "green", "does not hold": "red", "not tested": "yellow"}


def check_model(spec: SpecFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check the guarantees of a spec's own code at toy size. Exits with 1 if one does not hold.

    Trains the package on the first rows of its data with up to four CPU processes of this machine, without a service.
    Choose a small model with --set code.config.…
    """
    if find_spec("torch") is None:
        fail(f"torch is not installed here; run {install('torch')}")
    body, text = read_spec(spec, overrides or ())
    try:
        job = parse_text(body)
    except SpecError as error:
        fail("the spec is invalid:", [text.error(problem) for problem in error.problems], code=Exit.USAGE)
    if job.code is None:
        fail(f"{spec} has no own code (code); models of transformers are in Trainshed's table of models")
    found = list[Finding]()
    with notes.status("checking; a minute at most"):
        for one in _checked(job):
            found.append(one)
            if not as_json:
                _show(one)
    answer = Findings(ok=all(one.verdict != "does not hold" for one in found), findings=found)
    if as_json:
        show_json(answer)
    else:
        wrong = sum(one.verdict == "does not hold" for one in found)
        show_text("all tested guarantees hold" if answer.ok else f"{wrong} of {len(found)} guarantees do not hold")
        show_next(f"submit {spec}" if answer.ok else f"check-model {spec} (once that is fixed)")
    raise typer.Exit(Exit.DONE if answer.ok else Exit.FAILED)


def _checked(job: JobSpec) -> Iterator[Finding]:
    """Yield the findings of a process that imports torch and the package. Exits with an error if it fails."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            [sys.executable, "-m", "train_loop.conformance"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(job.model_dump_json().encode())
        process.stdin.close()
        for line in process.stdout:
            answer = json.loads(line)
            if "error" in answer:
                fail(answer["error"])
            yield Finding.model_validate(answer)
        if process.wait():
            output.seek(0)
            told = output.read().decode(errors="replace").splitlines()
            fail(f"the checks ended with {process.returncode}; their output ends with", told[-_LAST_LINES:])


def _show(one: Finding) -> None:
    verdict = Text(f"{one.verdict:<14}", style=_COLOURS[one.verdict])
    console.print(Text.assemble(verdict, show(f"{one.guarantee}: {one.seen}")))
    if one.remedy is not None:
        show_text(f"{'':14}→ {one.remedy}")
