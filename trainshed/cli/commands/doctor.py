"""`trainshed doctor`: checks of this machine, the service, its cluster and its storage."""

import os

import httpx
import typer
from pydantic import BaseModel
from rich.text import Text

from service.api.schemas import FindingOut
from service.config.settings import Settings
from service.domain.doctor.finding import Finding, Verdict, failed, ok
from train_loop.spec import show
from trainshed import ApiError, Client, NoKeyError
from trainshed.address import find_url
from trainshed.cli.connect import SHORT_SECONDS, load_settings
from trainshed.cli.exit_codes import Exit
from trainshed.cli.home_checks import check_home
from trainshed.cli.options import AsJson
from trainshed.cli.output.printing import console, notes, show_json, show_next, show_text
from trainshed.cli.process import find_running

_COLOURS = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red", Verdict.SKIPPED: "dim"}


class Findings(BaseModel):
    """Results of the local checks and of the service's checks; `ok` if none failed."""

    ok: bool
    findings: list[FindingOut]


def doctor(as_json: AsJson = False) -> None:
    """Check this machine, the service, its cluster and its storage. Exits with 1 if a check fails."""
    config = load_settings()
    with notes.status("examining; two minutes at most"):
        found = [*_here(config), *_by_service()]
    answer = Findings(ok=all(one.verdict is not Verdict.FAILED for one in found), findings=found)
    if as_json:
        show_json(answer)
    else:
        _show(answer)
    raise typer.Exit(Exit.DONE if answer.ok else Exit.FAILED)


def _here(config: Settings) -> list[FindingOut]:
    if os.environ.get("TRAINSHED_URL"):
        # The service is on another machine and does not use this home.
        return []
    return [_out(one) for one in check_home(config, runs=find_running(config) is not None)]


def _by_service() -> list[FindingOut]:
    """Check that the service answers, and return that result with the service's own results."""
    check = "service.answers"
    try:
        with Client(patience=SHORT_SECONDS) as client:
            found = client.api.doctor()
    except (NoKeyError, ApiError) as error:
        return [_out(failed(check, str(error), "send a key that opens all projects: TRAINSHED_KEY, or admin.key"))]
    except httpx.HTTPError as error:
        remedy = "start it with `trainshed up`, or set TRAINSHED_URL; cluster and storage are checked by the service"
        return [_out(failed(check, f"{find_url()}: {error}", remedy))]
    return [_out(ok(check, find_url())), *found.findings]


def _out(finding: Finding) -> FindingOut:
    return FindingOut.model_validate(finding, from_attributes=True)


def _show(answer: Findings) -> None:
    width = max(len(one.check) for one in answer.findings)
    for one in answer.findings:
        verdict = Text(f"{one.verdict:<8}", style=_COLOURS[one.verdict])
        console.print(Text.assemble(verdict, show(f"{one.check:<{width}}  {one.seen}")))
        if one.remedy is not None:
            show_text(f"{'':8}{'':{width}}  → {one.remedy}")
    wrong = sum(one.verdict is Verdict.FAILED for one in answer.findings)
    show_text("all checks passed" if answer.ok else f"{wrong} of {len(answer.findings)} checks failed")
    show_next("submit SPEC" if answer.ok else "doctor (once that is fixed)")
