"""Every command line against a real service process: exit code, output, JSON and error."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from service.api.schemas import KeyIn, WebhookIn
from service.domain.jobs.job import JobState
from tests.api.cli.cases import CASES
from tests.support.builders.tensors import tensor_checkpoint
from tests.support.fakes.service import spec_body
from tests.support.servers.receivers import receiving
from tests.support.waiting import wait_for
from train_loop.run_dir import ExportStatus, ExportWish, JsonLines, RunDir
from trainshed import Api, Client
from trainshed.cli.commands.init import Template
from trainshed.cli.exit_codes import Exit
from trainshed.cli.main import app

# These run last: they change jobs that other commands read.
_LAST = ("cancel", "rm")
ELSEWHERE = {
    "serve": "runs until it is stopped: test_serve.py",
    "diff": "computes digests in processes that import torch: test_cli_diff.py",
    "check-model": "starts ranks: tests/distributed/test_check_model.py",
    "weights convert": "imports torch in a process: tests/distributed/checkpoint/test_export.py",
    "nodes": "needs a cluster that answers: test_nodes.py",
    "results": "needs an inference job: tests/api/test_infer.py",
    "restore": "needs a home without one: tests/unit/service/test_backup.py",
    **dict.fromkeys(("down", "doctor"), "need separate homes: test_local.py"),
}

BUILT = {
    "units": [{"module": "TinyLayer", "count": 2, "parameters": 1024, "bytes": 4096, "dtype": "fp32"}],
    "mesh": {"fsdp": 2, "sp": 1},
    "hosts": {"host-a": [0, 1]},
    "dtypes": {"weights": "fp32"},
    "attention": "sdpa",
    "loss_chunk_tokens": None,
    "checkpointing": "full",
    "optimizer_groups": [{"optimizer": "AdamW", "lr": 0.001, "weight_decay": 0.0, "tensors": 4, "parameters": 2048}],
    "cores": 1,
    "backend": "gloo",
    "tree": "FSDPTiny(\n  (layers): 2 x FSDPTinyLayer()\n)",
}
"""Fields of the event `model_built`."""
SCORE = {
    "device": "h200",
    "tokens_per_second": {"least": 60_000, "most": 90_000, "measured": 75_300},
    "inside": True,
    "device_bytes": {"planned": 9 << 30, "measured": 10 << 30},
    "steps": 20,
}
"""Fields of the event `forecast_scored`."""


@dataclass(frozen=True)
class World:
    """A service with some jobs."""

    api: Api
    environment: dict[str, str]
    names: dict[str, str]

    def fill(self, text: str) -> str:
        """Replace `{names}` in a text by ids of the service."""
        return text.format_map(self.names)

    def invoke(self, line: str) -> Result:
        """Run a command line in this process; test_local.py runs the command as a process."""
        return CliRunner(env=self.environment).invoke(app, shlex.split(self.fill(line)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start a service whose cluster never answers."""
    home = tmp_path_factory.mktemp("home")
    own = {"TRAINSHED_HOME": str(home), "TRAINSHED_PORT": "0", "TRAINSHED_RAY_ADDRESS": "http://127.0.0.1:9"}
    allowed = {"TRAINSHED_WEBHOOK_ALLOWED": "127.0.0.1"}
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("TRAINSHED_")}
    environment = {**foreign, **own, **allowed, "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-m", "service.serve"]
    with (
        receiving() as receiver,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3]
            with Client(url, (home / "admin.key").read_text().strip()) as client:
                yield World(client.api, environment, _names(client.api, home, receiver.url()))
        finally:
            process.kill()


def _names(api: Api, home: Path, receiver: str) -> dict[str, str]:
    (home / "spec.json").write_text(spec_body())
    (home / "arguments.json").write_text(
        json.dumps({"output_dir": "out", "learning_rate": 1e-5, "num_train_epochs": 1})
    )
    hook, *hooks = (
        api.create_webhook(WebhookIn(project=project, url=receiver)).webhook.id for project in ("default", "a", "b")
    )
    trained, other, ended, gone = (api.submit(spec_body(labels={"team": "nlp"})) for _ in range(4))
    _train(RunDir.at(trained.run_dir))
    for job in (ended, gone):
        api.cancel(job.id)
        wait_for(partial(_has_ended, api, job.id), "a job that has ended")
    key = api.create_key(KeyIn.model_validate({"name": "bob", "roles": {"nlp": "viewer"}})).key
    jobs = {"trained": trained.id, "short": trained.id.removeprefix("job-").upper()[:-1], "other": other.id}
    jobs |= {"ended": ended.id, "gone": gone.id}
    webhooks = {"hook": hook, "number": str(api.deliveries(hook).data[0].number)}
    webhooks |= dict(zip(("ended_hook", "gone_hook"), hooks, strict=True))
    return {**jobs, **webhooks, "key": key.id, "home": str(home), "spec": str(home / "spec.json"),
            "arguments": str(home / "arguments.json")}  # fmt: skip


def _has_ended(api: Api, job_id: str) -> bool:
    return api.job(job_id).state is JobState.CANCELLED


def _train(run_dir: RunDir) -> None:
    """Write the files of two steps and a checkpoint."""
    attempt = run_dir.attempt(1)
    attempt.logs.mkdir(parents=True)
    JsonLines(attempt.events, attempt=1).append(event="prepared", samples=3)
    events = JsonLines(attempt.events, attempt=1)
    events.append(event="model_built", **BUILT)
    events.append(event="micro_batch_chosen", size=4, device="cpu", workers=2, because="plan")
    events.append(event="forecast_scored", **SCORE)
    for step in (1, 2):
        JsonLines(attempt.metrics, attempt=1).append(step=step, loss=3.0 - step, tokens_per_second=10.0)
    attempt.rank_log(0).write_text("2026-11-23 20:00:00,000 INFO here\n2026-11-23 20:00:01,000 WARNING disk is full\n")
    tensor_checkpoint(run_dir, 20, {"model": {"weight": torch.ones(2, 3)}})
    wish = ExportWish(dtype="bf16")
    run_dir.exports.folder(20, wish).mkdir(parents=True)
    run_dir.exports.write(ExportStatus(step=20, wish=wish, state="done", time=0.0))


def _commands(group: TyperGroup, above: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield above + name


def test_every_command_is_in_the_table() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    assert sorted(_commands(group)) == sorted([*CASES, *ELSEWHERE])


@pytest.mark.parametrize("command", sorted(CASES, key=_LAST.count))
def test_command_prints_output_json_and_error(world: World, command: str) -> None:
    case = CASES[command]
    refused = world.invoke(case.bad)
    assert (refused.exit_code, refused.stdout) == (case.bad_code, ""), refused.output
    assert _error_text(refused.stderr) == world.fill(case.error)
    answer = world.invoke(f"{case.typed} --json")
    assert (answer.exit_code, answer.stderr) == (Exit.DONE, "")
    assert json.loads(answer.stdout).keys() >= set(case.fields.split())
    done = world.invoke(case.typed.replace("{ended", "{gone"))
    assert done.exit_code == Exit.DONE, done.stderr
    assert world.fill(case.output.replace("{ended", "{gone")) in done.stdout
    assert re.search(r"^next: trainshed [a-z]", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize("template", Template)
def test_init_writes_a_spec_that_plans_without_edits(world: World, template: Template) -> None:
    file = f"{{home}}/{template}/job.yaml"
    Path(world.fill(file)).parent.mkdir()
    written = world.invoke(f"init {file} --from {template}")
    assert (written.exit_code, written.stdout) == (Exit.DONE, world.fill(f"{file}\n"))
    planned = world.invoke(f"plan {file}")
    assert planned.exit_code == Exit.DONE, planned.stderr
    assert "workers  2" in planned.stdout
    assert "warning" not in planned.output


def _error_text(stderr: str) -> str:
    """Return an error without its prefix or frame: Trainshed prints a line, the option parser a box."""
    boxed = [line.strip("│ ") for line in stderr.splitlines() if line.startswith("│")]
    return " ".join(boxed) if boxed else stderr.removeprefix("trainshed: ").rstrip("\n")
