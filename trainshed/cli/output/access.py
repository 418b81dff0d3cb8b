"""Text output of keys, roles and the audit log."""

from collections.abc import Iterable, Mapping

from service.api.schemas import DeedOut, KeyOut, Me
from service.domain.access.roles import Role
from trainshed.cli.output.printing import show_facts, show_table


def show_keys(keys: Iterable[KeyOut]) -> None:
    """Print keys, one per row."""
    rows = (
        (
            key.id,
            key.name,
            f"{key.created_at:%F}",
            "revoked" if key.revoked_at else f"until {key.expires_at:%F %T}" if key.expires_at else "",
            _roles(key.roles) + (" and in other projects" if key.shared else ""),
        )
        for key in keys
    )
    show_table(("id", "name", "created", "", "roles"), rows)


def show_me(me: Me) -> None:
    """Print the key in use and its roles."""
    show_facts({"id": me.id, "name": me.name, "roles": _roles(me.roles)})


def show_audit(entries: Iterable[DeedOut]) -> None:
    """Print the audit log, one write per row."""
    rows = (
        (
            str(entry.number),
            f"{entry.time:%F %T}",
            entry.key_name,
            entry.action,
            entry.target,
            entry.project,
            _changes(entry),
        )
        for entry in entries
    )
    show_table(("number", "time", "who", "what", "to", "project", "changes"), rows)


def _roles(roles: Mapping[str, Role]) -> str:
    return " ".join(f"{project}={role}" for project, role in roles.items())


def _changes(entry: DeedOut) -> str:
    names = dict.fromkeys((*entry.before, *entry.after))
    return ", ".join(f"{name}: {entry.before.get(name)} → {entry.after.get(name)}" for name in names)
