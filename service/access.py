"""Keys, tokens and the audit log: who opens the service, who may let others in, and what was done."""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic import JsonValue

from service.domain.access import ANY, OPERATOR, Caller, Deed, Key, Role, Roles
from service.domain.token import NoSubject, TokenRules, is_token
from service.errors import Forbidden, InvalidRequest, KeyNotFound, Unauthorized
from service.ports import KeyStore, TokenVerifier
from train_loop.spec import Problem

_MARK = "trainshed"
"""What every secret begins with, so that those who look for lost ones find it."""
_OTHER_KEY = "send the one line of $TRAINSHED_HOME/admin.key, or ask an admin of your project for a key"


@dataclass(frozen=True)
class Tokens:
    """Callers who are known to somebody else, who issues tokens to them."""

    verifier: TokenVerifier
    rules: TokenRules

    def identify(self, token: str) -> Caller:
        """Whose token this is. Raises Unauthorized, IssuerUnavailable."""
        try:
            return self.rules.caller_of(self.verifier.verify(token))
        except NoSubject as error:
            raise Unauthorized(f"this token opens nothing: {error}; its issuer has to say of whom it is") from error


@dataclass(frozen=True)
class Access:
    """The use cases of keys and tokens, over the ports they need."""

    store: KeyStore
    operator_sha256: str
    clock: Callable[[], float]
    new_id: Callable[[], str]
    tokens: Tokens | None = None
    scraper_sha256: str | None = None
    """Of the key that opens the metrics alone."""
    caller: Caller = OPERATOR

    def of(self, caller: Caller) -> "Access":
        """The same for another caller."""
        return replace(self, caller=caller)

    def is_operator(self, secret: str) -> bool:
        """Whether this is the key in the operator's file; asks nobody."""
        return hmac.compare_digest(_sha256(secret), self.operator_sha256)

    def is_scraper(self, secret: str) -> bool:
        """Return whether this is the key that opens only the metrics."""
        return self.scraper_sha256 is not None and hmac.compare_digest(_sha256(secret), self.scraper_sha256)

    def identify(self, secret: str) -> Caller:
        """Whose key or token this is, if it opens anything now. Raises Unauthorized, Forbidden, IssuerUnavailable."""
        if self.is_operator(secret):
            return OPERATOR
        if self.is_scraper(secret):
            raise Forbidden(f"the key of TRAINSHED_METRICS_KEY_FILE opens GET /metrics only; {_OTHER_KEY}")
        if is_token(secret):
            if self.tokens is None:
                raise Unauthorized(
                    "this is a token, and only keys are known here; send one, or set TRAINSHED_OIDC_ISSUER"
                )
            return self.tokens.identify(secret)
        mark, _, rest = secret.partition("_")
        key = self.store.get(f"key-{rest.partition('_')[0]}") if mark == _MARK else None
        # Digests, so that the comparison takes the same time whatever was sent.
        if key is None or not hmac.compare_digest(_sha256(secret), key.sha256) or not key.opens(self.clock()):
            raise Unauthorized(f"this key opens nothing, or not any more; {_OTHER_KEY}")
        return Caller(key.id, key.name, key.roles)

    def opens(self, caller: Caller) -> bool:
        """Whether one who was let in would be let in now."""
        if caller.until is not None:
            return self.clock() < caller.until
        key = self.store.get(caller.id) if caller.id != OPERATOR.id else None
        return caller.id == OPERATOR.id or (key is not None and key.opens(self.clock()))

    def create(self, name: str, roles: Roles, expires_at: float | None) -> tuple[Key, str]:
        """A new key, and its secret, which nobody can be told again. Raises Forbidden, InvalidRequest."""
        for project in roles:
            self._must_admin(project)
        now, number = self.clock(), self.new_id()
        if expires_at is not None and expires_at <= now:
            raise InvalidRequest([Problem("/expires_at", "the key would be over already; choose a time to come")])
        secret = f"{_MARK}_{number}_{secrets.token_hex(32)}"
        key = Key(f"key-{number}", name, dict(roles), _sha256(secret), now, self.caller.id, expires_at)
        self.store.add(key, self._deed("create", key))
        return key, secret

    def visible(self) -> list[Key]:
        """Those that open a project of which the caller is an admin, newest first."""
        return [key for key in self.store.all() if key.roles_shown_to(self.caller)]

    def revoke(self, key_id: str) -> None:
        """Let a key open nothing from now on; repeatable. Raises KeyNotFound, Forbidden."""
        key = next((key for key in self.visible() if key.id == key_id), None)
        if key is None:
            raise KeyNotFound(key_id)
        if key.roles_shown_to(self.caller) != key.roles:
            raise Forbidden(
                f"{key_id} has roles in projects that {self.caller.name!r} does not administer; ask an admin of all"
            )
        self.store.revoke(key_id, now=self.clock(), deed=self._deed("revoke", key))

    def deeds(self, project: str | None, *, after: int | None, limit: int) -> list[tuple[int, Deed]]:
        """What was done in the projects of which the caller is an admin, newest first."""
        mine = self.caller.projects(Role.ADMIN)
        if project is not None:
            mine = frozenset({project}) if mine is None else mine & {project}
        return self.store.deeds(mine, after=after, limit=limit)

    def _must_admin(self, project: str) -> None:
        if not self.caller.may(Role.ADMIN, project):
            what = "all projects" if project == ANY else f"project {project!r}"
            raise Forbidden(f"key {self.caller.name!r} is no admin of {what}; ask one who is")

    def _deed(self, verb: str, key: Key) -> Deed:
        project = next(iter(key.roles)) if len(key.roles) == 1 else ANY
        facts: dict[str, JsonValue] = {
            "name": key.name,
            "roles": {project: role.value for project, role in key.roles.items()},
        }
        after: dict[str, JsonValue] = {**facts, "expires_at": key.expires_at} if verb == "create" else {}
        return Deed(self.clock(), self.caller, f"key.{verb}", project, key.id, {} if after else facts, after)


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
