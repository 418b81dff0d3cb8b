"""Access control: keys, their roles in projects, and the audit log."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue

ANY = "*"
"""Project name that stands for all projects, also future ones."""
PROJECT_OR_ANY = rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\{ANY})$"
"""Pattern of a project name or ANY."""


class Role(StrEnum):
    """A role in a project; each role includes the roles before it."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"

    def covers(self, other: "Role") -> bool:
        """Return whether this role includes the other role."""
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(other)


Roles = Mapping[str, Role]
"""Roles by project, or for ANY."""


@dataclass(frozen=True)
class Principal:
    """The principal of a request: its key or token, and its roles."""

    id: str
    name: str
    roles: Roles
    request_id: str = ""
    until: float | None = None
    """Expiry of the token (Unix seconds); None for a key, whose expiry is in the store."""

    def has_role(self, role: Role, project: str) -> bool:
        """Return whether the caller has at least this role in a project."""
        return any(self.roles[scope].covers(role) for scope in (project, ANY) if scope in self.roles)

    def projects(self, role: Role, *, among: frozenset[str] | None = None) -> frozenset[str] | None:
        """Return the projects in which the caller has at least this role, only those in `among` if it is given.

        None means all projects.
        """
        if self.has_role(role, ANY):
            return among
        own = frozenset(project for project in self.roles if self.has_role(role, project))
        return own if among is None else own & among

    @property
    def edits(self) -> bool:
        """Return whether the caller is an editor of any project."""
        return any(role.covers(Role.EDITOR) for role in self.roles.values())

    @property
    def scope(self) -> str:
        """Return the namespace of the caller's Idempotency-Keys."""
        if self.id == OPERATOR.id:
            return ""
        # A subject may contain the separator between scope and key, and may be too long for the column.
        return self.id if self.until is None else hashlib.sha256(self.id.encode()).hexdigest()


OPERATOR = Principal("operator", "operator", {ANY: Role.ADMIN})
"""The caller that can read $TRAINSHED_HOME/admin.key."""


SCRAPER = Principal("metrics", "metrics", {ANY: Role.VIEWER})
"""The caller with the key of TRAINSHED_METRICS_KEY_FILE, which gives access to /metrics only."""


@dataclass(frozen=True)
class Key:
    """An API key. Only the SHA-256 of its secret is stored. Times are Unix seconds."""

    id: str
    name: str
    roles: Roles
    sha256: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, now: float) -> bool:
        """Return whether the key is neither revoked nor expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def roles_shown_to(self, caller: Principal) -> Roles:
        """Return the roles in projects that the caller administers."""
        return {project: role for project, role in self.roles.items() if caller.has_role(Role.ADMIN, project)}


@dataclass(frozen=True)
class AuditEntry:
    """An audit log entry of one write: the caller, the action and the change."""

    time: float
    caller: Principal
    action: str
    """Action as `<noun>.<verb>`, e.g. job.pause."""
    project: str
    """Project of the target; ANY if there are several."""
    target: str
    """Id of the changed object."""
    before: Mapping[str, JsonValue] = field(default_factory=dict)
    after: Mapping[str, JsonValue] = field(default_factory=dict)
