"""API calls for keys and the audit log."""

from types import NoneType

from service.api.schemas import DeedOut, KeyIn, Keys, Me, NewKey, Page
from service.client.call import Sent, operation


class AccessCalls:
    """Calls of /keys, /me and /audit."""

    # Not repeatable: a retry after a lost response would leave a key whose secret is unknown.
    @operation(NewKey, "POST", "/keys", repeatable=False)
    def create_key(self, wish: KeyIn) -> Sent:
        """Create a key. Only this response contains its secret."""
        return Sent(body=wish)

    @operation(Keys, "GET", "/keys")
    def keys(self) -> Sent:
        """List the keys with a role in a project that the caller administers, newest first."""
        return Sent()

    @operation(NoneType, "DELETE", "/keys/{key_id}")
    def revoke_key(self, key_id: str) -> Sent:
        """Revoke a key."""
        return Sent({"key_id": key_id})

    @operation(Me, "GET", "/me")
    def me(self) -> Sent:
        """Return the key in use and its roles."""
        return Sent()

    @operation(Page[DeedOut], "GET", "/audit")
    def audit(self, *, project: str | None = None, after: int | None = None, limit: int = 50) -> Sent:
        """Return a page of the writes in projects that the caller administers, newest first."""
        return Sent(query={"project": project, "after": after, "limit": limit})
