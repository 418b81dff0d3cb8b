"""What the claims of a token say of its bearer."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import JsonValue

from service.domain.access import Caller, Role, Roles

Claims = Mapping[str, JsonValue]
LEEWAY = 30.0
"""Seconds by which our clock and the issuer's may differ."""
_NAMES = ("preferred_username", "email", "name")
_SUBJECT, _NAME = 255, 64
"""Characters; OpenID Connect allows a subject so many."""


class NoSubject(ValueError):
    """The claims do not say of whom they speak."""


@dataclass(frozen=True)
class TokenRules:
    """Which claim holds the groups of a caller, and what each group may do in which project."""

    groups_claim: str
    groups: Mapping[str, Roles]

    def caller_of(self, claims: Claims) -> Caller:
        """Who calls; in no project anything where no group of theirs is known. Raises NoSubject."""
        subject, until = claims.get("sub"), claims.get("exp")
        if not _plain(subject, _SUBJECT) or not isinstance(until, int | float):
            raise NoSubject(f"the claim sub must be 1 to {_SUBJECT} printable characters, and exp a time")
        name = next((str(claims[one])[:_NAME] for one in _NAMES if _plain(claims.get(one), _SUBJECT)), str(subject))
        roles = self._roles(claims.get(self.groups_claim))
        return Caller(f"oidc:{subject}", name[:_NAME], roles, until=until + LEEWAY)

    def _roles(self, told: JsonValue) -> Roles:
        """The highest role that any of the groups has in each project."""
        named = [told] if isinstance(told, str) else told if isinstance(told, list) else []
        roles = dict[str, Role]()
        for group in named:
            for project, role in self.groups.get(group, {}).items() if isinstance(group, str) else ():
                roles[project] = role if role.covers(roles.get(project, role)) else roles[project]
        return roles


def is_token(secret: str) -> bool:
    """Whether it has the form of a JSON Web Token, which no key has: three parts with dots between them."""
    return secret.count(".") == 2


def tamper_proof(url: str) -> bool:
    """Whether what it answers comes from where it says: over https, or from this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost"))


def _plain(value: JsonValue, most: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= most and value.isprintable()
