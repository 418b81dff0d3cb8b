"""Where keys and the audit log are stored, durably; and who checks tokens."""

from typing import Protocol

from service.domain.access import Deed, Key
from service.domain.token import Claims


class KeyStore(Protocol):
    """Keys, and the audit log: every change of a key and its deed are stored at once, durably."""

    def add(self, key: Key, deed: Deed) -> None:
        """Store a new key."""

    def get(self, key_id: str) -> Key | None:
        """The key with this id."""

    def all(self) -> list[Key]:
        """Every key there was, newest first."""

    def revoke(self, key_id: str, *, now: float, deed: Deed) -> bool:
        """Let a key open nothing from now on; False: it was revoked before, and the first time stays."""

    def record(self, deed: Deed) -> None:
        """Write down what was done to something that is not in the database."""

    def deeds(self, projects: frozenset[str] | None, *, after: int | None, limit: int) -> list[tuple[int, Deed]]:
        """What was done in these projects, newest first, before a deed of this number; None: all of it."""


class TokenVerifier(Protocol):
    """Knows which tokens were issued for this service."""

    def verify(self, token: str) -> Claims:
        """The claims of a token that is in order. Raises Unauthorized, IssuerUnavailable."""
