"""/keys and /audit: who may call, and what callers did."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from service.access import Access
from service.api.guard import CallerIs, parse_body, read_body
from service.api.schemas import Page, Time, as_time
from service.domain.access import ANY, Deed, Key, Role

router = APIRouter(tags=["access"])
Project = Annotated[str, Field(pattern=rf"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\{ANY})$", max_length=40)]


class KeyIn(BaseModel):
    """A key that is to be made."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=64, description="whose it is")
    roles: dict[Project, Role] = Field(min_length=1, max_length=64, description=f"by project; {ANY} stands for all")
    expires_at: AwareDatetime | None = None


_KEY_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": KeyIn.model_json_schema()}}}}


class KeyOut(BaseModel):
    """A key, without what it opens the service with."""

    id: str
    name: str
    roles: dict[str, Role]
    created_at: Time
    created_by: str = Field(description="id of a key; `operator` is the one in $TRAINSHED_HOME/admin.key")
    expires_at: Time | None
    revoked_at: Time | None

    @classmethod
    def of(cls, key: Key) -> "KeyOut":
        """From the domain."""
        return cls(
            id=key.id,
            name=key.name,
            roles=dict(key.roles),
            created_at=as_time(key.created_at),
            created_by=key.created_by,
            expires_at=None if key.expires_at is None else as_time(key.expires_at),
            revoked_at=None if key.revoked_at is None else as_time(key.revoked_at),
        )


class NewKey(BaseModel):
    """A key that was made just now."""

    key: KeyOut
    secret: str = Field(description="what goes behind `Authorization: Bearer`; it is not shown again")


class Keys(BaseModel):
    """Keys, newest first."""

    data: list[KeyOut]


class DeedOut(BaseModel):
    """A write: who did what, and what it changed."""

    number: int
    time: Time
    key_id: str
    key_name: str
    request_id: str
    action: str
    project: str
    target: str
    before: dict[str, JsonValue]
    after: dict[str, JsonValue]

    @classmethod
    def of(cls, number: int, deed: Deed) -> "DeedOut":
        """From the domain."""
        return cls(
            number=number,
            time=as_time(deed.time),
            key_id=deed.caller.id,
            key_name=deed.caller.name,
            request_id=deed.caller.request_id,
            action=deed.action,
            project=deed.project,
            target=deed.target,
            before=dict(deed.before),
            after=dict(deed.after),
        )


class Me(BaseModel):
    """Who the caller is."""

    id: str
    name: str
    roles: dict[str, Role]


async def access_of(request: Request, caller: CallerIs) -> Access:
    """The use cases for the caller of this request."""
    access: Access = request.app.state.access
    return access.of(caller)


UseCases = Annotated[Access, Depends(access_of)]


@router.get("/me")
def me(caller: CallerIs) -> Me:
    """What the key that was sent opens."""
    return Me(id=caller.id, name=caller.name, roles=dict(caller.roles))


@router.post("/keys", status_code=201, openapi_extra=_KEY_BODY)
def create(access: UseCases, body: Annotated[bytes, Depends(read_body)]) -> NewKey:
    """Make a key for projects of which one is an admin; its secret is shown this once."""
    wish = parse_body(KeyIn, body)
    key, secret = access.create(wish.name, wish.roles, _seconds(wish.expires_at))
    return NewKey(key=KeyOut.of(key), secret=secret)


@router.get("/keys")
def keys(access: UseCases) -> Keys:
    """The keys that open a project of which one is an admin, newest first."""
    return Keys(data=[KeyOut.of(key) for key in access.visible()])


@router.delete("/keys/{key_id}", status_code=204)
def revoke(access: UseCases, key_id: Annotated[str, Path(max_length=64)]) -> None:
    """Let a key open nothing from now on; repeatable."""
    access.revoke(key_id)


@router.get("/audit")
def audit(
    access: UseCases,
    project: str | None = None,
    after: Annotated[int | None, Query(ge=1, le=2**62, description="`next` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[DeedOut]:
    """The writes in projects of which one is an admin, newest first."""
    found = access.deeds(project, after=after, limit=limit + 1)
    data = [DeedOut.of(number, deed) for number, deed in found[:limit]]
    more = len(found) > limit
    return Page(data=data, has_more=more, next=str(data[-1].number) if more else None)


def _seconds(time: datetime | None) -> float | None:
    return None if time is None else time.timestamp()
