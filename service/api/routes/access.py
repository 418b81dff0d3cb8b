"""/me, /keys and /audit: the caller, API keys and the audit log."""

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request

from service.api.authentication import CallerIs
from service.api.bodies import parse_body, read_body
from service.api.convert import audit_entry_out, key_out
from service.api.openapi import json_body
from service.api.schemas import DeedOut, KeyIn, Keys, Me, NewKey, Page
from service.domain.access.roles import Role
from service.use_cases.access.access import Access

router = APIRouter(tags=["access"])


async def access_of(request: Request) -> Access:
    """Return the use cases of the app that serves this request."""
    access: Access = request.app.state.access
    return access


UseCases = Annotated[Access, Depends(access_of)]


@router.get("/me")
def me(caller: CallerIs) -> Me:
    """Get the caller's key and roles."""
    return Me(id=caller.id, name=caller.name, roles=dict(caller.roles))


@router.post("/keys", status_code=201, openapi_extra=json_body(KeyIn, required=True))
def create(caller: CallerIs, access: UseCases, body: Annotated[bytes, Depends(read_body)]) -> NewKey:
    """Create a key for projects that the caller administers. Its secret is shown only once."""
    wanted = parse_body(KeyIn, body)
    expires_at = None if wanted.expires_at is None else wanted.expires_at.timestamp()
    roles = {project: Role(role) for project, role in wanted.roles.items()}
    key, secret = access.create(caller, wanted.name, roles, expires_at)
    return NewKey(key=key_out(key, caller), secret=secret)


@router.get("/keys")
def keys(caller: CallerIs, access: UseCases) -> Keys:
    """List the keys with a role in a project that the caller administers, newest first."""
    return Keys(data=[key_out(key, caller) for key in access.visible(caller)])


@router.delete("/keys/{key_id}", status_code=204)
def revoke(caller: CallerIs, access: UseCases, key_id: Annotated[str, Path(max_length=64)]) -> None:
    """Revoke a key. Idempotent."""
    access.revoke(caller, key_id)


@router.get("/audit")
def audit(
    caller: CallerIs,
    access: UseCases,
    project: str | None = None,
    after: Annotated[int | None, Query(ge=1, le=2**62, description="`next` of the previous page")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[DeedOut]:
    """List the writes in projects that the caller administers, newest first."""
    found = access.audit_log(caller, project, after=after, limit=limit + 1)
    data = [audit_entry_out(number, entry) for number, entry in found[:limit]]
    more = len(found) > limit
    return Page(data=data, has_more=more, next=str(data[-1].number) if more else None)
