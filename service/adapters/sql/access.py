"""A KeyStore on SQLite or Postgres."""

import json
from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import Connection, Engine, Row, insert, select, update

from service.adapters.sql.tables import audit_log, keys
from service.domain.access.roles import AuditEntry, Key, Principal, Role


class SqlKeyStore:
    """A KeyStore with keys and audit entries as rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, key: Key, entry: AuditEntry) -> None:
        """Store a new key."""
        with self._engine.begin() as connection:
            connection.execute(insert(keys).values(asdict(key) | {"roles": json.dumps(key.roles)}))
            write_audit_entries(connection, [entry])

    def get(self, key_id: str) -> Key | None:
        """Return the key with this id; None if there is none."""
        with self._engine.connect() as connection:
            row = connection.execute(select(keys).where(keys.c.id == key_id)).first()
        return _key(row) if row is not None else None

    def all(self) -> list[Key]:
        """Return all keys, also expired and revoked ones, newest first."""
        with self._engine.connect() as connection:
            return [_key(row) for row in connection.execute(select(keys).order_by(keys.c.id.desc()))]

    def revoke(self, key_id: str, *, now: float, entry: AuditEntry) -> bool:
        """Revoke a key. Return False if it was revoked before; the first time of revocation stays."""
        mine = update(keys).where(keys.c.id == key_id, keys.c.revoked_at.is_(None)).values(revoked_at=now)
        with self._engine.begin() as connection:
            if connection.execute(mine).rowcount != 1:
                return False
            write_audit_entries(connection, [entry])
        return True

    def record(self, entry: AuditEntry) -> None:
        """Store the audit entry of a change that is not in the database."""
        with self._engine.begin() as connection:
            write_audit_entries(connection, [entry])

    def entries(
        self, projects: frozenset[str] | None, *, after: int | None, limit: int
    ) -> list[tuple[int, AuditEntry]]:
        """Return the audit entries of these projects (None: of all), newest first, with numbers below `after`."""
        query = select(audit_log).order_by(audit_log.c.number.desc()).limit(limit)
        if projects is not None:
            query = query.where(audit_log.c.project.in_(projects))
        if after is not None:
            query = query.where(audit_log.c.number < after)
        with self._engine.connect() as connection:
            return [(row.number, _to_entry(row)) for row in connection.execute(query)]


def write_audit_entries(connection: Connection, done: Iterable[AuditEntry | None]) -> None:
    """Write audit entries in the transaction of the change that they record."""
    rows = [
        {
            "time": entry.time,
            "key_id": entry.caller.id,
            "key_name": entry.caller.name,
            "request_id": entry.caller.request_id,
            "action": entry.action,
            "project": entry.project,
            "target": entry.target,
            "before": json.dumps(dict(entry.before)),
            "after": json.dumps(dict(entry.after)),
        }
        for entry in done
        if entry is not None
    ]
    if rows:
        connection.execute(insert(audit_log), rows)


def _key(row: Row[tuple[object, ...]]) -> Key:
    roles = {project: Role(role) for project, role in json.loads(row.roles).items()}
    return Key(**dict(row._mapping) | {"roles": roles})


def _to_entry(row: Row[tuple[object, ...]]) -> AuditEntry:
    caller = Principal(row.key_id, row.key_name, {}, row.request_id)
    before, after = json.loads(row.before), json.loads(row.after)
    return AuditEntry(row.time, caller, row.action, row.project, row.target, before, after)
