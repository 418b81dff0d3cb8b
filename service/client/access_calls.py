"""The calls about keys, and about what callers did."""

from types import NoneType

from service.api.access_schemas import DeedOut, KeyIn, Keys, Me, NewKey
from service.api.schemas import Page
from service.client.call import Sent, operation


class AccessCalls:
    """/keys, /me and /audit."""

    # Tried again after its answer was lost it would leave a key that nobody has.
    @operation(NewKey, "POST", "/keys", repeatable=False)
    def create_key(self, wish: KeyIn) -> Sent:
        """Make a key; its secret is in this answer alone."""
        return Sent(body=wish)

    @operation(Keys, "GET", "/keys")
    def keys(self) -> Sent:
        """The keys that open a project of which one is an admin, newest first."""
        return Sent()

    @operation(NoneType, "DELETE", "/keys/{key_id}")
    def revoke_key(self, key_id: str) -> Sent:
        """Let a key open nothing from now on."""
        return Sent({"key_id": key_id})

    @operation(Me, "GET", "/me")
    def me(self) -> Sent:
        """What the key in use opens."""
        return Sent()

    @operation(Page[DeedOut], "GET", "/audit")
    def audit(self, *, project: str | None = None, after: int | None = None, limit: int = 50) -> Sent:
        """A page of the writes in projects of which one is an admin, newest first."""
        return Sent(query={"project": project, "after": after, "limit": limit})
