"""`trainshed webhooks` with receivers that fail."""

from pathlib import Path

import pytest

from service.domain.webhooks.delivery import Answer, Delivery, DeliveryStatus, Message
from tests.support.clients.command import run
from tests.support.fakes.service import FakeService


@pytest.fixture
def webhook(home: Path) -> str:
    """Create a webhook and return its id."""
    made = run("webhooks", "create", "https://hooks.example/in", "--project", "nlp", "--state", "failed")
    assert (made.exit_code, made.stdout[:6], made.stdout.count("\n")) == (0, "whsec_", 1), made.stderr
    assert "next: trainshed webhooks test hook-0001" in made.stderr
    return "hook-0001"


def test_failed_test_call_exits_1(webhook: str, service: FakeService) -> None:
    service.sender.answers = [Answer(500, "answered 500"), Answer(None, "no answer within 10 s"), Answer(204)]
    refused = run("webhooks", "test", webhook)
    assert (refused.exit_code, refused.stdout) == (1, f"{webhook} has not received it: answered 500\n")
    assert f"next: trainshed webhooks show {webhook}" in refused.stderr
    answer = run("webhooks", "test", webhook, "--json")
    assert (answer.exit_code, '"received": false' in answer.stdout, answer.stderr) == (1, True, "")
    assert run("webhooks", "test", "0001").stdout == f"{webhook} has received it\n"


def test_disabled_webhook_shows_its_reason_and_the_next_command(webhook: str, service: FakeService) -> None:
    for name, value in (("disabled_at", 5.0), ("disabled_because", "answered 410")):
        object.__setattr__(service.hooks.webhooks[webhook], name, value)
    shown = run("webhooks", "show", webhook)
    assert "disabled  1970-01-01 00:00:05: answered 410" in shown.stdout
    assert "states  FAILED" in shown.stdout
    assert f"next: trainshed webhooks test {webhook}" in shown.stderr
    assert "disabled" in run("webhooks", "ls").stdout
    assert (
        f"is disabled; `trainshed webhooks test {webhook}` enables it"
        in run("webhooks", "redeliver", webhook, "1").stderr
    )


def test_deliveries_show_failures_page_by_page(webhook: str, service: FakeService) -> None:
    nothing = run("webhooks", "deliveries", webhook)
    assert f"next: trainshed webhooks test {webhook}" in nothing.stderr
    for number in (1, 2):
        message = Message(f"job-1.{number}", "job.state", "job-1", "{}", 1.0)
        service.hooks.log.append(
            Delivery(number, webhook, message, since=1.0, next_at=9.0, attempts=3, error="answered 500")
        )
    assert service.hooks.log[0].settled is DeliveryStatus.WAITING
    first = run("webhooks", "deliveries", webhook, "--limit", "1")
    assert first.stdout.splitlines()[1].split(maxsplit=6)[4:] == [
        "waiting",
        "3",
        "next try 1970-01-01 00:00:09: answered 500",
    ]
    assert f"next: trainshed webhooks deliveries {webhook} --after 2" in first.stderr
    last = run("webhooks", "deliveries", webhook, "--after", "2")
    assert f"next: trainshed webhooks redeliver {webhook} 1" in last.stderr
    assert run("webhooks", "redeliver", "hook-00", "1").stdout == f"1 of {webhook} is sent again\n"


def test_rejected_webhook_names_the_field(home: Path) -> None:
    refused = run("webhooks", "create", "https://127.0.0.1/in", "--project", "nlp")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith("trainshed: /url: 127.0.0.1 is not on the public internet")
    assert "Missing option '--project'" in run("webhooks", "create", "https://hooks.example/in").stderr
    none = run("webhooks", "ls")
    assert "next: trainshed webhooks create URL --project PROJECT" in none.stderr
