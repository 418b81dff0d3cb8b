"""WebhookStore contract, on memory, SQLite and Postgres (if its binaries are installed)."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from service.adapters.sql.webhooks import SqlWebhookStore
from service.domain.access.roles import OPERATOR, AuditEntry
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import (
    LIMIT,
)
from service.errors import WebhookLimit
from service.ports import WebhookStore
from tests.support.fakes.webhooks import MemoryWebhookStore, a_webhook
from tests.support.servers.databases import database_url, emptied

ENTRY = AuditEntry(1.0, OPERATOR, "webhook.test", "default", "hook-1")


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def hooks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WebhookStore]:
    if request.param == "memory":
        yield MemoryWebhookStore()
        return
    with emptied(database_url(request, tmp_path)) as engine:
        yield SqlWebhookStore(engine)


def test_webhook_store_returns_webhooks_unchanged(hooks: WebhookStore) -> None:
    first, second = a_webhook(1), a_webhook(2, project="other", states=(JobState.FAILED,))
    for webhook in (first, second):
        hooks.add(webhook, ENTRY)
    assert (hooks.get("hook-1"), hooks.get("hook-3")) == (first, None)
    assert hooks.among(None) == [second, first]
    assert hooks.among(frozenset({"other"})) == [second]
    rotated = hooks.rotate("hook-1", "new", until=9.0, entry=ENTRY)
    assert rotated == replace(first, secret="new", previous_secret=first.secret, previous_until=9.0)
    assert rotated == hooks.get("hook-1")
    assert rotated is not None
    assert (rotated.secrets(8.9), rotated.secrets(9.0)) == (("new", first.secret), ("new",))
    assert hooks.rotate("hook-3", "new", until=9.0, entry=ENTRY) is None
    assert "whsec_" not in repr(rotated) + repr(rotated.facts)


def test_webhook_limit_of_a_project_holds_under_concurrent_adds(hooks: WebhookStore) -> None:
    for number in range(LIMIT - 2):
        hooks.add(a_webhook(number), ENTRY)
    refused = list[WebhookLimit]()

    def add(number: int) -> None:
        try:
            hooks.add(a_webhook(number), ENTRY)
        except WebhookLimit as error:
            refused.append(error)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(100, 105)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(hooks.among(None)), len(refused)) == (LIMIT, 3)
    assert "delete one first" in str(refused[0])
    hooks.delete(hooks.among(None)[0].id, ENTRY)
    hooks.add(a_webhook(200), ENTRY)
    hooks.add(a_webhook(201, project="other"), ENTRY)
