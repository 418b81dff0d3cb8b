"""API keys, tokens and the audit log: authentication, key management and the record of changes."""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import JsonValue

from service.domain.access.oidc_claims import MissingSubject, TokenRules, is_token
from service.domain.access.permissions import administered, require_admin
from service.domain.access.roles import ANY, OPERATOR, AuditEntry, Key, Principal, Roles
from service.errors import Forbidden, InvalidRequest, KeyNotFound, Unauthorized
from service.ports import KeyStore, TokenVerifier
from train_loop.spec import Problem

KEY_PREFIX = "trainshed"
"""Prefix of every secret, so that secret scanners find leaked ones."""
_OTHER_KEY = "send the key in $TRAINSHED_HOME/admin.key, or ask an admin of your project for a key"


@dataclass(frozen=True)
class Tokens:
    """Authentication with tokens of an OIDC issuer."""

    verifier: TokenVerifier
    rules: TokenRules

    def identify(self, token: str) -> Principal:
        """Return the caller that a token identifies. Raises Unauthorized, IssuerUnavailable."""
        try:
            return self.rules.caller_of(self.verifier.verify(token))
        except MissingSubject as error:
            raise Unauthorized(f"invalid token: {error}; check the configuration of its issuer") from error


@dataclass(frozen=True)
class Access:
    """Use cases of keys and tokens."""

    store: KeyStore
    operator_sha256: str
    clock: Callable[[], float]
    new_id: Callable[[], str]
    tokens: Tokens | None = None
    scraper_sha256: str | None = None
    """SHA-256 of the key that is valid for the metrics only."""

    def is_operator(self, secret: str) -> bool:
        """Return whether this is the operator's key; needs no database."""
        return hmac.compare_digest(_sha256(secret), self.operator_sha256)

    def is_scraper(self, secret: str) -> bool:
        """Return whether this is the key that is valid for the metrics only."""
        return self.scraper_sha256 is not None and hmac.compare_digest(_sha256(secret), self.scraper_sha256)

    def identify(self, secret: str) -> Principal:
        """Return the caller that a valid key or token identifies.

        Raises Unauthorized, Forbidden, IssuerUnavailable.
        """
        if self.is_operator(secret):
            return OPERATOR
        if self.is_scraper(secret):
            raise Forbidden(f"the key of TRAINSHED_METRICS_KEY_FILE is valid for GET /metrics only; {_OTHER_KEY}")
        if is_token(secret):
            if self.tokens is None:
                raise Unauthorized("this service accepts keys, not tokens; send a key, or set TRAINSHED_OIDC_ISSUER")
            return self.tokens.identify(secret)
        mark, _, rest = secret.partition("_")
        key = self.store.get(f"key-{rest.partition('_')[0]}") if mark == KEY_PREFIX else None
        # Comparing digests takes the same time for every secret.
        if key is None or not hmac.compare_digest(_sha256(secret), key.sha256) or not key.is_valid(self.clock()):
            raise Unauthorized(f"unknown, expired or revoked key; {_OTHER_KEY}")
        return Principal(key.id, key.name, key.roles)

    def is_valid(self, caller: Principal) -> bool:
        """Return whether the key or token of an authenticated caller is still valid."""
        if caller.until is not None:
            return self.clock() < caller.until
        key = self.store.get(caller.id) if caller.id != OPERATOR.id else None
        return caller.id == OPERATOR.id or (key is not None and key.is_valid(self.clock()))

    def create(self, caller: Principal, name: str, roles: Roles, expires_at: float | None) -> tuple[Key, str]:
        """Create a key; return it with its secret, which is not stored. Raises Forbidden, InvalidRequest."""
        for project in roles:
            require_admin(caller, project)
        now, number = self.clock(), self.new_id()
        if expires_at is not None and expires_at <= now:
            raise InvalidRequest([Problem("/expires_at", "the time is in the past; choose a future time")])
        secret = f"{KEY_PREFIX}_{number}_{secrets.token_hex(32)}"
        key = Key(f"key-{number}", name, dict(roles), _sha256(secret), now, caller.id, expires_at)
        self.store.add(key, self._audit_entry(caller, "create", key))
        return key, secret

    def visible(self, caller: Principal) -> list[Key]:
        """Return the keys of the projects that the caller administers, newest first. Raises Forbidden."""
        administered(caller, None)
        return self._shown(caller)

    def _shown(self, caller: Principal) -> list[Key]:
        return [key for key in self.store.all() if key.roles_shown_to(caller)]

    def revoke(self, caller: Principal, key_id: str) -> None:
        """Revoke a key; idempotent. Raises KeyNotFound, Forbidden."""
        key = next((key for key in self._shown(caller) if key.id == key_id), None)
        if key is None:
            raise KeyNotFound(key_id)
        if key.roles_shown_to(caller) != key.roles:
            raise Forbidden(
                f"{key_id} has roles in projects that {caller.name!r} does not administer; ask an admin of all of them"
            )
        self.store.revoke(key_id, now=self.clock(), entry=self._audit_entry(caller, "revoke", key))

    def audit_log(
        self, caller: Principal, project: str | None, *, after: int | None, limit: int
    ) -> list[tuple[int, AuditEntry]]:
        """Return the audit log of a project, or of all projects that the caller administers, newest first.

        Raises Forbidden.
        """
        return self.store.entries(administered(caller, project), after=after, limit=limit)

    def _audit_entry(self, caller: Principal, verb: str, key: Key) -> AuditEntry:
        project = next(iter(key.roles)) if len(key.roles) == 1 else ANY
        facts: dict[str, JsonValue] = {
            "name": key.name,
            "roles": {project: role.value for project, role in key.roles.items()},
        }
        after: dict[str, JsonValue] = {**facts, "expires_at": key.expires_at} if verb == "create" else {}
        return AuditEntry(self.clock(), caller, f"key.{verb}", project, key.id, {} if after else facts, after)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
