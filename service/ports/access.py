"""Ports for keys, the audit log and the verification of tokens."""

from typing import Protocol

from service.domain.access.oidc_claims import Claims
from service.domain.access.roles import AuditEntry, Key


class KeyStore(Protocol):
    """Durable store of keys and the audit log. A change and its audit entry are stored in one transaction."""

    def add(self, key: Key, entry: AuditEntry) -> None:
        """Store a new key."""

    def get(self, key_id: str) -> Key | None:
        """Return the key with this id; None if there is none."""

    def all(self) -> list[Key]:
        """Return all keys, also expired and revoked ones, newest first."""

    def revoke(self, key_id: str, *, now: float, entry: AuditEntry) -> bool:
        """Revoke a key. Return False if it was revoked before; the first time of revocation stays."""

    def record(self, entry: AuditEntry) -> None:
        """Store the audit entry of a change that is not in the database."""

    def entries(
        self, projects: frozenset[str] | None, *, after: int | None, limit: int
    ) -> list[tuple[int, AuditEntry]]:
        """Return the audit entries of these projects (None: of all), newest first, with numbers below `after`."""


class TokenVerifier(Protocol):
    """A verifier of tokens that were issued for this service."""

    def verify(self, token: str) -> Claims:
        """Return the claims of a token. Raises Unauthorized if it is invalid, IssuerUnavailable if this is unknown."""
