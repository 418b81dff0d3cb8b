"""Roles per project and the KeyStore contract, on memory, SQLite and Postgres (if its binaries are installed)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.store import SqlJobStore
from service.domain.access.oidc_claims import LEEWAY, MissingSubject, TokenRules
from service.domain.access.roles import ANY, AuditEntry, Key, Principal, Role
from service.domain.jobs.job import StopRequest
from service.ports import IdempotencyKey, JobStore, KeyStore, NewJob
from tests.support.fakes.service import a_job
from tests.support.fakes.stores import MemoryJobStore, MemoryKeyStore
from tests.support.servers.databases import database_url, emptied

ROLES = st.dictionaries(st.sampled_from(["a", "b", ANY]), st.sampled_from(Role))
ALICE = Principal(f"oidc:{'a' * 255}", "alice", {}, "request-1")
Stores = tuple[JobStore, KeyStore]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stores]:
    if request.param == "memory":
        memory = MemoryJobStore()
        yield memory, MemoryKeyStore(memory.audit_log)
        return
    with emptied(database_url(request, tmp_path)) as engine:
        yield SqlJobStore(engine), SqlKeyStore(engine)


def a_key(number: int, **roles: Role) -> Key:
    return Key(f"key-{number}", "bob", roles or {"a": Role.EDITOR}, "ab" * 32, 1.5, "operator", expires_at=9.5)


def an_entry(action: str, project: str = "default", target: str = "job-1") -> AuditEntry:
    return AuditEntry(2.5, ALICE, action, project, target, {"state": "QUEUED"}, {"state": "PAUSED", "step": 3})


@given(ROLES)
def test_caller_has_role_if_it_or_a_higher_one_was_granted(roles: dict[str, Role]) -> None:
    caller, ranks = Principal("key-1", "bob", roles), list(Role)
    for project in ("a", "b", "c"):
        granted = [ranks.index(roles[scope]) for scope in (project, ANY) if scope in roles]
        for role in Role:
            assert caller.has_role(role, project) == any(rank >= ranks.index(role) for rank in granted)
            seen = caller.projects(role)
            assert caller.has_role(role, project) == (seen is None or project in seen)


@given(st.lists(st.sampled_from(["x", "y", "z", "unheard-of"])), st.dictionaries(st.sampled_from("xyz"), ROLES))
def test_caller_of_token_gets_highest_role_of_its_groups(names: list[str], groups: dict[str, dict[str, Role]]) -> None:
    caller = TokenRules("teams", groups).caller_of({"sub": "1", "exp": 9, "teams": [*names, 7, None]})
    for project in ("a", "b", "c"):
        for role in Role:
            granted = (Principal("key-1", "bob", groups[name]) for name in names if name in groups)
            assert caller.has_role(role, project) == any(one.has_role(role, project) for one in granted)


def test_caller_of_token_takes_name_from_claims_and_rejects_invalid_sub_or_exp() -> None:
    rules = TokenRules("groups", {})
    bare: dict[str, JsonValue] = {"sub": "00u1", "exp": 9.5}
    assert rules.caller_of(bare) == Principal("oidc:00u1", "00u1", {}, until=9.5 + LEEWAY)
    named: dict[str, JsonValue] = {"name": "Alice A.", "email": "alice@acme.example", "preferred_username": "a\0"}
    assert rules.caller_of(bare | named).name == "alice@acme.example"
    assert len(rules.caller_of(bare | {"name": "x" * 200}).name) == 64
    for name, wrong in (
        ("sub", None),
        ("sub", ""),
        ("sub", 7),
        ("sub", "x" * 256),
        ("sub", "a\n"),
        ("exp", "soon"),
        ("exp", 10**400),
    ):
        with pytest.raises(MissingSubject):
            rules.caller_of({**bare, name: wrong})


def test_idempotency_key_ids_of_different_callers_never_collide() -> None:
    callers = [
        Principal(one, "x", {}, until=until) for one, until in (("oidc:a", 1.0), ("oidc:a:b", 1.0), ("key-1", None))
    ]
    assert len({IdempotencyKey(key, "", one.scope).id for one in callers for key in ("k", "b:k", "x" * 255)}) == 9
    assert all(len(IdempotencyKey("x" * 255, "", one.scope).id) <= 320 for one in callers)


def test_key_opens_until_expired_or_revoked() -> None:
    key = a_key(1)
    assert [key.is_valid(now) for now in (0.0, 9.4, 9.5, 10.0)] == [True, True, False, False]
    assert not replace(key, revoked_at=5.0).is_valid(5.0)
    assert replace(key, expires_at=None).is_valid(1e12)


def test_key_store_returns_keys_unchanged_and_revokes_each_once(stores: Stores) -> None:
    _, keys = stores
    first, second = a_key(1), a_key(2, a=Role.VIEWER, b=Role.ADMIN)
    for key in (first, second):
        keys.add(key, an_entry("key.create", target=key.id))
    assert keys.get("key-2") == second
    assert keys.get("key-3") is None
    assert keys.all() == [second, first]
    assert keys.revoke("key-1", now=4.0, entry=an_entry("key.revoke"))
    assert not keys.revoke("key-1", now=5.0, entry=an_entry("key.revoke"))
    assert not keys.revoke("key-3", now=5.0, entry=an_entry("key.revoke"))
    assert keys.get("key-1") == replace(first, revoked_at=4.0)
    assert [entry.action for _, entry in keys.entries(None, after=None, limit=9)] == [
        "key.revoke",
        "key.create",
        "key.create",
    ]


def test_deed_is_stored_only_if_its_change_succeeds(stores: Stores) -> None:
    jobs, keys = stores
    job = a_job()
    jobs.add(NewJob(job, audit_entries=(an_entry("job.submit"),)))
    assert jobs.add_all([NewJob(a_job("job-2"), audit_entries=(an_entry("job.submit", target="job-2"),))], now=0.0)
    paused = replace(job, stop_request=StopRequest("pause", checkpoint=True, deadline=5.0))
    assert jobs.save(paused, entry=an_entry("job.pause"))
    assert not jobs.save(paused, entry=an_entry("job.pause")), "the version has changed"
    assert not jobs.save(a_job(), owner="me", entry=an_entry("job.pause")), "owner 'me' does not hold the lease"
    assert not jobs.delete(job, {}, an_entry("job.delete"))
    newest = jobs.get("job-1")
    assert newest is not None
    assert jobs.delete(newest, {}, an_entry("job.delete"))
    found = [entry for _, entry in keys.entries(None, after=None, limit=9)]
    assert [entry.action for entry in found] == ["job.delete", "job.pause", "job.submit", "job.submit"]
    assert found[1] == an_entry("job.pause")


def test_deeds_are_paged_and_filtered_by_project(stores: Stores) -> None:
    _, keys = stores
    for number in range(6):
        keys.record(an_entry(f"job.{number}", project="ab"[number % 2]))
    first = keys.entries(frozenset({"a"}), after=None, limit=2)
    assert [entry.action for _, entry in first] == ["job.4", "job.2"]
    rest = keys.entries(frozenset({"a"}), after=first[-1][0], limit=2)
    assert [entry.action for _, entry in rest] == ["job.0"]
    assert keys.entries(frozenset(), after=None, limit=9) == []
