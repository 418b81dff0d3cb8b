"""`make demo`: starts a service, trains a job, kills a worker with SIGKILL, and checks that no data was lost."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from service.api.schemas import JobOut, LinePage
from service.config.address import ServiceAddress
from train_loop.checkpoint.manifest import newest_verified
from train_loop.run_dir import RunDir
from trainshed import Api, ApiError, Client, NoKeyError

SPEC = Path(__file__).with_name("quickstart.yaml")
START_LIMIT, RUN_LIMIT, STOP_LIMIT = 60.0, 600.0, 60.0
STEPS_TO_LOSE = 5
PLAIN_SECONDS = 5.0
Line = dict[str, Any]

console = Console(highlight=False)


class DemoError(RuntimeError):
    """An error that stops the demo."""


EXPECTED = (DemoError, ApiError, NoKeyError, httpx.HTTPError, OSError)
"""Errors that a demo prints in one line: the service refuses, does not answer, or its files cannot be used."""


@dataclass
class RunSummary:
    """Observed state, events and metrics of the run."""

    job: JobOut
    events: list[Line] = field(default_factory=list)
    metrics: list[Line] = field(default_factory=list)
    killed: Line | None = None

    def named(self, name: str) -> list[Line]:
        """Return the events with a name, in order."""
        return [event for event in self.events if event["event"] == name]


def main() -> int:
    """Run the demo. Return 0 if all checks pass, else 1."""
    began = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="trainshed-demo-"))
    try:
        with service(home) as (client, url):
            summary = follow(client, client.submit(SPEC.read_bytes()))
            faults = check(summary)
            if summary.named("training_started"):
                summarise(summary, url)
    except EXPECTED as error:
        faults = [str(error)]
    setup = os.environ.get("TRAINSHED_SETUP_SECONDS", "not measured")
    console.print(
        f"\nSetup took {setup} s, the run {time.monotonic() - began:.0f} s. All processes of the demo have exited."
    )
    return report(faults, home)


def report(faults: list[str], home: Path) -> int:
    """Print the failed checks and where the logs are, or remove the demo's files. Return the exit code."""
    for fault in faults:
        console.print(f"[bold red]FAILED[/] {escape(fault)}")
    if faults:
        console.print(f"Logs: {home}/service.log, {home}/ray.log and the run directories below {home}/runs")
    else:
        shutil.rmtree(home, ignore_errors=True)
        console.print("[bold green]All checks of the demo passed.[/]")
    return 1 if faults else 0


@contextmanager
def service(home: Path, **settings: str) -> Iterator[tuple[Api, str]]:
    """Run a service in `home` for the body, with embedded Ray and SQLite unless `settings` override them."""
    # A killed service leaves this file.
    (home / "service.json").unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINSHED_", "RAY_"))}
    environment |= {"TRAINSHED_HOME": str(home), "TRAINSHED_PORT": "0", "OMP_NUM_THREADS": "1"} | settings
    with (home / "service.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "service.serve"], stdout=log, stderr=log, env=environment)
    try:
        address = _wait_for_address(home, process)
        console.print(f"[bold]Service[/] {address.url} (API docs: {address.url}/docs), home {home}")
        with Client(address.url, (home / "admin.key").read_text().strip()) as client:
            yield client.api, address.url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError(f"the service did not stop within {STOP_LIMIT:g} s and was killed; see {home}") from None


def _wait_for_address(home: Path, process: subprocess.Popen[bytes]) -> ServiceAddress:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline and process.poll() is None:
        if (home / "service.json").exists():
            return ServiceAddress.model_validate_json((home / "service.json").read_bytes())
        time.sleep(0.1)
    raise DemoError(f"the service did not start: {(home / 'service.log').read_text()[-2000:]}")


def follow(client: Api, job: JobOut) -> RunSummary:
    """Follow the job until it finishes, and kill a worker after the first committed checkpoint."""
    console.print(f"[bold]Job[/] {job.id} submitted from {SPEC.name}")
    summary, printed_at, deadline = RunSummary(job), time.monotonic(), time.monotonic() + RUN_LIMIT
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        while not summary.job.state.terminal:
            if time.monotonic() > deadline:
                raise DemoError(f"the job was still {summary.job.state} after {RUN_LIMIT:g} s: {why(summary.job)}")
            refresh(client, summary)
            live.update(progress_line(summary.job))
            if not console.is_terminal and time.monotonic() > printed_at + PLAIN_SECONDS:
                # A log cannot overwrite a line: print one every 5 s.
                console.print(progress_line(summary.job))
                printed_at = time.monotonic()
            if summary.killed is None and _is_past_a_checkpoint(summary):
                summary.killed = kill_a_worker(summary)
            time.sleep(0.25)
    refresh(client, summary)
    return summary


def _is_past_a_checkpoint(summary: RunSummary) -> bool:
    """Return whether 5 steps have followed the first committed checkpoint: work that a restart must repeat."""
    committed = summary.named("checkpoint_committed")
    return bool(committed and summary.metrics and summary.metrics[-1]["step"] >= committed[0]["step"] + STEPS_TO_LOSE)


def refresh(client: Api, summary: RunSummary) -> None:
    """Read new state, events and metrics of the job, and print what has changed."""
    before = summary.job.state
    summary.job = client.job(summary.job.id)
    fresh = _read_on(client.events, summary.job.id, summary.events)
    _read_on(client.metrics, summary.job.id, summary.metrics)
    if summary.job.state is not before:
        console.print(f"  {summary.job.state}" + (f": {why(summary.job)}" if summary.job.reason else ""), markup=False)
    for event in fresh:
        sentence = describe(event)
        if sentence:
            console.print(f"  {sentence}", markup=False)


def _read_on(fetch: Callable[..., LinePage], job_id: str, known: list[Line]) -> list[Line]:
    """Append new lines to `known`, and return them."""
    fresh: list[Line] = []
    more = True
    while more:
        seen = fresh or known
        page = fetch(job_id, after=f"{seen[-1]['attempt']}.{seen[-1]['seq']}" if seen else None, limit=1000)
        fresh += page.data
        more = page.has_more
    known += fresh
    return fresh


def describe(event: Line) -> str | None:
    """Return an event as a sentence; None for events that the demo does not print."""
    match event["event"]:
        case "preparing":
            return f"preparing {event['files']} files, {event['bytes'] / 1e6:.1f} MB of Python's own sources"
        case "prepared":
            full = f"{event['utilisation']:.1%} full"
            return f"prepared {event['samples']} samples, {full}: {event['tokens']:,} tokens of {event['rows']} files"
        case "training_started":
            return f"training on {event['world']} workers from step {event['resumed_from']} of {event['steps']}"
        case "checkpoint_committed":
            return f"checkpoint of step {event['step']} committed, {event['bytes'] / 1e6:.0f} MB"
        case "workers_lost":
            return f"the worker group was lost: {event['error']}"
    return None


def why(job: JobOut) -> str | None:
    """Return the reason of the job's state."""
    return job.reason.message if job.reason else None


def progress_line(job: JobOut) -> Text:
    """Return state, step, loss, speed and remaining time in one line."""
    parts, progress = [str(job.state)], job.progress
    if not progress.step:
        parts.append(why(job) or "waiting for the first step")
    else:
        parts.append(f"step {progress.step}/{progress.of}")
        parts += [f"loss {progress.loss:.3f}"] if progress.loss is not None else []
        parts += [f"{progress.tokens_per_second:,.0f} tokens/s"] if progress.tokens_per_second is not None else []
        parts += [f"{progress.eta_seconds:.0f} s to go"] if progress.eta_seconds is not None else []
    return Text("  " + " · ".join(parts))


def kill_a_worker(summary: RunSummary) -> Line:
    """Kill the last rank's process with SIGKILL."""
    worker: Line = summary.named("training_started")[-1]["workers"][-1]
    console.print(f"  [bold yellow]killing the worker of rank {worker['rank']}, pid {worker['pid']}, with SIGKILL[/]")
    try:
        os.kill(worker["pid"], signal.SIGKILL)
    except ProcessLookupError as error:
        raise DemoError(f"the worker of rank {worker['rank']} exited before the kill") from error
    return worker


def check(summary: RunSummary) -> list[str]:
    """Return the failed checks of the run."""
    starts, steps = summary.named("training_started"), _surviving(summary.metrics)
    if summary.job.state != "SUCCEEDED":
        return [f"the job ended as {summary.job.state}: {why(summary.job)}"]
    faults = []
    if summary.killed is None:
        faults.append("no worker was killed")
    if len(starts) != 2 or summary.job.attempt != 1:
        faults.append(f"training started {len(starts)} times in {summary.job.attempt} attempts; expected 2 in 1")
    elif starts[1]["resumed_from"] == 0:
        faults.append("the run restarted from step 0 instead of a checkpoint")
    first, last = steps[1]["loss"], steps[max(steps)]["loss"]
    if not last < 0.9 * first:
        faults.append(f"the loss went from {first:.3f} to {last:.3f}; expected a decrease of more than 10 %")
    newest, rejected = newest_verified(RunDir.at(summary.job.run_dir))
    if newest is None or rejected:
        faults.append(f"the newest checkpoint is invalid: {rejected or 'not found'}")
    return faults + check_samples(summary, steps)


def check_samples(summary: RunSummary, steps: dict[int, Line]) -> list[str]:
    """Return the faults unless each sample was trained exactly once and repeated steps had the same samples."""
    faults = []
    start = summary.named("training_started")[0]
    if sorted(steps) != list(range(1, start["steps"] + 1)):
        faults.append(f"steps are missing: {sorted(set(range(1, start['steps'] + 1)) - set(steps))}")
    for line in summary.metrics:
        if line["samples"] != steps[line["step"]]["samples"]:
            faults.append(f"step {line['step']} was repeated with different samples")
    counts = Counter(sample for line in steps.values() for sample in line["samples"])
    repeated = [sample for sample, count in counts.items() if count > 1]
    if repeated or len(counts) != start["steps"] * start["global_batch"]:
        faults.append(f"{len(counts)} different samples were trained, {len(repeated)} of them more than once")
    return faults


def _surviving(metrics: list[Line]) -> dict[int, Line]:
    """Return the last metrics line of each step, which belongs to the final weights."""
    return {line["step"]: line for line in metrics}


def summarise(summary: RunSummary, url: str) -> None:
    """Print a table of the run's results."""
    start, steps = summary.named("training_started"), _surviving(summary.metrics)
    speeds = sorted(line["tokens_per_second"] for line in steps.values())
    table = Table(title="Results", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in {
        "state": summary.job.state,
        "mesh": ", ".join(f"{axis} {size}" for axis, size in start[0]["mesh"].items()),
        "steps": len(steps),
        "loss, first → last": f"{steps[1]['loss']:.3f} → {steps[max(steps)]['loss']:.3f}" if steps else "none",
        "tokens/s, median step": f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "none",
        "restarts": summary.job.restarts,
        "resumed from step": start[-1]["resumed_from"],
        "steps replayed": summary.job.lost_work.steps,
        "checkpoints committed": len(summary.named("checkpoint_committed")),
        "samples trained": sum(len(line["samples"]) for line in steps.values()),
        "Ray dashboard": f"{summary.job.dashboard_url} (while it ran)",
        "API docs": f"{url}/docs (while it ran)",
    }.items():
        table.add_row(name, str(value))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
