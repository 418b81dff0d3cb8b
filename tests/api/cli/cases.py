"""A valid and an invalid command line for each command, with what they print."""

from dataclasses import dataclass

UNKNOWN = "job-00000000000000000000000000"


@dataclass(frozen=True)
class Case:
    """A command line with its output, and an invalid one with its error; `{names}` stand for ids of the service."""

    typed: str
    output: str
    """Text that stdout contains without --json."""
    fields: str
    """Keys that the JSON output contains, separated by spaces."""
    bad: str
    error: str
    """The whole error of `bad`, without its prefix or frame."""
    bad_code: int = 1


_NO_JOB = f"job {UNKNOWN} not found; list jobs with `trainshed ps`"
_NO_HOOK = "hook-zz not found; list ids with `trainshed webhooks ls`"
_NO_MATCH = "job-zz not found; list ids with `trainshed ps`"
_NO_STEP = (
    "checkpoint of step 7 of {trained} not found, or deleted; list checkpoints with `trainshed checkpoints {trained}`"
)
CASES = {
    "up": Case(
        "up",
        "http://127.0.0.1:",
        "url pid started",
        "up --wait -1",
        "Invalid value for '--wait': Input should be greater than or equal to 0",
        bad_code=2,
    ),
    "backup": Case(
        "backup {home}/{ended}.tar",
        "{home}/{ended}.tar",
        "trainshed sha256",
        "backup {spec}",
        "{spec} already exists; choose another file name",
    ),
    "init": Case(
        "init {home}/{ended}.yaml",
        "{home}/{ended}.yaml",
        "template spec json_schema data",
        "init {spec}",
        "{spec} already exists; name a new file, or add --force to replace it",
        bad_code=2,
    ),
    "schema": Case(
        "schema",
        '"$id": "urn:trainshed:job-spec"',
        "$schema $id title $defs",
        "schema --output {home}/nowhere/job.schema.json",
        "{home}/nowhere/job.schema.json: No such file or directory; name a writable file in an existing folder",
        bad_code=2,
    ),
    "import": Case(
        "import {arguments} --set name=mine",
        "name: mine",
        "formats spec rows",
        "import {spec}",
        "the file cannot be imported:\n  /scaling/num_workers: the file is a configuration of Trainshed "
        "(scaling.num_workers), which needs no import; submit it: trainshed submit FILE",
        bad_code=2,
    ),
    "submit": Case(
        "submit {spec} --set name=another --set training.max_steps=7",
        "job-",
        "id spec progress",
        "submit {spec} --set training.max_stepz=7",
        "/training/max_stepz: no such field; did you mean max_steps? (--set training.max_stepz=7)",
    ),
    "clone": Case(
        "clone {trained} --step 0 --set training.max_steps=40",
        "job-",
        "id parent",
        "clone {trained} --step 7",
        _NO_STEP,
    ),
    "plan": Case(
        "plan {spec} --set scaling.num_workers=4",
        "fsdp 4, ulysses 1",
        "mesh memory",
        "plan {home}/nowhere.yaml",
        "{home}/nowhere.yaml: No such file or directory; name a readable job spec",
        bad_code=2,
    ),
    "ps": Case(
        "ps --name tiny --label team=nlp --state queued --project default --all",
        "tiny",
        "data has_more",
        "ps --label team",
        "invalid value 'team'; expected --label key=value",
        bad_code=2,
    ),
    "show": Case(
        "show {short}",
        "tokens per second  75,300, inside the forecast of 60,000 to 90,000",
        "id state",
        "show zz",
        _NO_MATCH,
    ),
    "watch": Case("watch {trained} --until queued", "QUEUED", "id state", f"watch {UNKNOWN}", _NO_JOB),
    "pause": Case("pause {other}", "{other} is PAUS", "state", f"pause {UNKNOWN}", _NO_JOB),
    "resume": Case(
        "resume {other}",
        "{other} is ",
        "state",
        "resume {ended}",
        "{ended} is CANCELLED and cannot be resumed; clone it to train from a checkpoint",
    ),
    "cancel": Case("cancel {ended}", "{ended} is CANCELLED", "state", f"cancel {UNKNOWN}", _NO_JOB),
    "rm": Case(
        "rm {ended}",
        "deleted {ended}",
        "id gone",
        "rm {trained}",
        "{trained} is QUEUED; cancel it first, then delete it",
    ),
    "events": Case(
        "events {trained} --contains prepared",
        "event=prepared samples=3",
        "data next",
        "events {trained} --after here",
        "--after: invalid cursor 'here'; expected `next` of a page",
    ),
    "describe": Case(
        "describe {trained}",
        "micro-batch  4, the largest that fits by the plan",
        "model_built micro_batch_chosen forecast_scored",
        "describe {other}",
        "{other} has not built its model yet; `trainshed show {other}` shows its state",
    ),
    "metrics": Case(
        "metrics {trained}",
        "loss  █▁  2 → 1",
        "data next",
        "metrics {trained} --points 1",
        "Invalid value for '--points': Input should be greater than or equal to 2",
        bad_code=2,
    ),
    "logs": Case(
        "logs {trained} --rank 0 --level warning --contains disk",
        "disk is full",
        "data next",
        "logs {trained} --rank 9",
        "--rank: rank 9 not found: the job has had 2 workers at most; ask for a rank from 0 to 1",
    ),
    "checkpoints": Case("checkpoints {trained}", "20", "data", f"checkpoints {UNKNOWN}", _NO_JOB),
    "verify": Case(
        "verify {trained} 20", "the checkpoint of step 20 is whole", "ok faults", "verify {trained} 7", _NO_STEP
    ),
    "pin": Case("pin {trained} 20", "the checkpoint of step 20 is pinned", "pinned", "pin {trained} 7", _NO_STEP),
    "export": Case(
        "export {trained} 20 --dtype bf16", "/export/step-00000020-model-bf16", "path", "export {trained} 7", _NO_STEP
    ),
    "keys create": Case(
        "keys create alice --role nlp=editor --days 3",
        "trainshed_",
        "key secret",
        "keys create alice --role nlp=owner",
        "roles/nlp: Input should be 'viewer', 'editor' or 'admin'; write --role nlp=editor",
        bad_code=2,
    ),
    "keys ls": Case("keys ls", "bob", "data", "keys ls bob", "Got unexpected extra argument(s) (bob)", bad_code=2),
    "keys revoke": Case(
        "keys revoke {key}",
        "revoked {key}",
        "id gone",
        "keys revoke zz",
        "key-zz not found; list ids with `trainshed keys ls`",
    ),
    "webhooks create": Case(
        "webhooks create https://hooks.example/in --project nlp --state failed",
        "whsec_",
        "webhook secret",
        "webhooks create https://hooks.example/in --project NLP",
        "project: String should match pattern '^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\\*)$'; "
        "see `trainshed webhooks create --help`",
        bad_code=2,
    ),
    "webhooks ls": Case(
        "webhooks ls --project default",
        "{hook}",
        "data",
        "webhooks ls default",
        "Got unexpected extra argument(s) (default)",
        bad_code=2,
    ),
    "webhooks show": Case("webhooks show {hook}", "all", "id url", "webhooks show zz", _NO_HOOK),
    "webhooks test": Case("webhooks test {hook}", "{hook} has received it", "received", "webhooks test zz", _NO_HOOK),
    "webhooks rotate": Case("webhooks rotate {hook}", "whsec_", "webhook secret", "webhooks rotate zz", _NO_HOOK),
    "webhooks deliveries": Case(
        "webhooks deliveries {hook} --limit 1",
        "job-",
        "data has_more next",
        "webhooks deliveries {hook} --limit 201",
        "Invalid value for '--limit': Input should be less than or equal to 200",
        bad_code=2,
    ),
    "webhooks redeliver": Case(
        "webhooks redeliver {hook} {number}",
        "{number} of {hook} is sent again",
        "number settled",
        "webhooks redeliver {hook} 999",
        "delivery 999 of {hook} not found, or deleted; list deliveries with `trainshed webhooks deliveries {hook}`",
    ),
    "webhooks rm": Case("webhooks rm {ended_hook}", "deleted {ended_hook}", "id gone", "webhooks rm zz", _NO_HOOK),
    "whoami": Case(
        "whoami", "operator", "id roles", "whoami alice", "Got unexpected extra argument(s) (alice)", bad_code=2
    ),
    "audit": Case(
        "audit --limit 50",
        "job.submit",
        "data next",
        "audit {trained}",
        "{trained} does not record the samples of its steps; set training.audit_samples: true in the spec and submit "
        "or clone the job",
    ),
    "usage": Case(
        "usage --since 2026-01-01 --project default",
        "day",
        "data",
        "usage --since yesterday",
        "Invalid value for '--since': 'yesterday' does not match the formats '%Y-%m-%d'.",
        bad_code=2,
    ),
}
