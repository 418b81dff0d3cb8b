"""Who may do what: keys, the roles that they give in projects, and the record of what was done with them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import JsonValue

ANY = "*"
"""In the place of a project: every one, those to come as well."""
PROJECT_OR_ANY = rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\{ANY})$"
"""Pattern of a project's name or ANY."""


class Role(StrEnum):
    """What one may do in a project; each may do what those before it may."""

    VIEWER = "viewer"
    EDITOR = "editor"
    ADMIN = "admin"

    def covers(self, other: "Role") -> bool:
        """Whether it is the other one or more than it."""
        ranks = list(Role)
        return ranks.index(self) >= ranks.index(other)


Roles = Mapping[str, Role]
"""By project, or for ANY."""


@dataclass(frozen=True)
class Caller:
    """Who calls: the key or the token that was sent, and what it opens."""

    id: str
    name: str
    roles: Roles
    request_id: str = ""
    until: float | None = None
    """When their token is over (Unix seconds); None for a key, of which the store knows."""

    def may(self, role: Role, project: str) -> bool:
        """Whether it has at least this role in a project."""
        return any(self.roles[scope].covers(role) for scope in (project, ANY) if scope in self.roles)

    def projects(self, role: Role) -> frozenset[str] | None:
        """Where it has at least this role; None: everywhere."""
        return None if self.may(role, ANY) else frozenset(one for one in self.roles if self.may(role, one))

    @property
    def edits(self) -> bool:
        """Whether it is an editor of any project."""
        return any(role.covers(Role.EDITOR) for role in self.roles.values())

    @property
    def scope(self) -> str:
        """What its Idempotency-Keys are told apart by from those of others."""
        if self.id == OPERATOR.id:
            return ""
        # A subject may hold what parts a scope from a key, and be longer than there is room for.
        return self.id if self.until is None else hashlib.sha256(self.id.encode()).hexdigest()


OPERATOR = Caller("operator", "operator", {ANY: Role.ADMIN})
"""Whoever can read $TRAINSHED_HOME/admin.key."""


SCRAPER = Caller("metrics", "metrics", {ANY: Role.VIEWER})
"""Whoever has the key of TRAINSHED_METRICS_KEY_FILE, which opens /metrics alone."""


@dataclass(frozen=True)
class Key:
    """What opens the service to somebody; of its secret only the SHA-256 is known. Times are Unix seconds."""

    id: str
    name: str
    roles: Roles
    sha256: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None

    def opens(self, now: float) -> bool:
        """Whether it is neither revoked nor over."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def roles_shown_to(self, caller: Caller) -> Roles:
        """Return the roles in projects that the caller administers."""
        return {project: role for project, role in self.roles.items() if caller.may(Role.ADMIN, project)}


@dataclass(frozen=True)
class Deed:
    """One write, for the audit log: who did what, and what it changed."""

    time: float
    caller: Caller
    action: str
    """`<noun>.<verb>`: job.pause."""
    project: str
    """ANY where it is about several."""
    target: str
    """The id of what was changed."""
    before: Mapping[str, JsonValue] = field(default_factory=dict)
    after: Mapping[str, JsonValue] = field(default_factory=dict)
