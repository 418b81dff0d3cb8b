"""Claims of a token, and the caller that they identify."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import JsonValue

from service.domain.access.roles import Principal, Role, Roles

Claims = Mapping[str, JsonValue]
LEEWAY = 30.0
"""Seconds by which the clocks of the service and the issuer may differ."""
_NAMES = ("preferred_username", "email", "name")
_LATEST = 1e15
"""Seconds since 1970; every later expiry is invalid."""
_SUBJECT, _NAME = 255, 64
"""Maximum lengths in characters; the first is the limit of OpenID Connect for a subject."""


class MissingSubject(ValueError):
    """Claims without a valid subject or expiry."""


@dataclass(frozen=True)
class TokenRules:
    """The claim that holds a caller's groups, and the roles of each group by project."""

    groups_claim: str
    groups: Mapping[str, Roles]

    def caller_of(self, claims: Claims) -> Principal:
        """Return the caller; without a known group it has no roles. Raises NoSubject if `sub` or `exp` is invalid."""
        subject, until = claims.get("sub"), claims.get("exp")
        # A larger integer is not a time, and cannot become a float.
        if not _plain(subject, _SUBJECT) or not isinstance(until, int | float) or not abs(until) < _LATEST:
            raise MissingSubject(f"the claim sub must be 1 to {_SUBJECT} printable characters, and exp a time")
        name = next((str(claims[one])[:_NAME] for one in _NAMES if _plain(claims.get(one), _SUBJECT)), str(subject))
        roles = self._roles(claims.get(self.groups_claim))
        return Principal(f"oidc:{subject}", name[:_NAME], roles, until=until + LEEWAY)

    def _roles(self, claim: JsonValue) -> Roles:
        """Return the highest role of any of the groups, by project."""
        named = [claim] if isinstance(claim, str) else claim if isinstance(claim, list) else []
        roles = dict[str, Role]()
        for group in named:
            for project, role in self.groups.get(group, {}).items() if isinstance(group, str) else ():
                roles[project] = role if role.covers(roles.get(project, role)) else roles[project]
        return roles


def is_token(secret: str) -> bool:
    """Return whether the secret has the form of a JSON Web Token: three parts with dots between. Keys do not."""
    return secret.count(".") == 2


def tamper_proof(url: str) -> bool:
    """Return whether answers from the URL cannot be tampered with: it uses https, or is on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"))


def _plain(value: JsonValue, most: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()
