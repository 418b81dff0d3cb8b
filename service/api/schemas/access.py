"""Request and response models of keys and of the audit log."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from service.api.schemas.common import RoleName, Time
from service.domain.access.roles import ANY, PROJECT_OR_ANY, Role
from train_loop.spec import refuse_hidden

Project = Annotated[str, Field(pattern=PROJECT_OR_ANY, max_length=40)]


class KeyIn(BaseModel):
    """A request to create a key."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, AfterValidator(refuse_hidden)] = Field(
        min_length=1, max_length=64, description="name of its holder"
    )
    roles: Mapping[Project, RoleName] = Field(
        min_length=1, max_length=64, description=f"roles by project; `{ANY}` for all projects"
    )
    # A time late in year 9999 falls into year 10000 in time zones east of UTC, which datetime cannot hold.
    expires_at: AwareDatetime | None = Field(default=None, lt=datetime(9999, 1, 1, tzinfo=UTC))


class KeyOut(BaseModel):
    """An API key, without its secret."""

    id: str
    name: str
    roles: dict[str, Role] = Field(description="roles in the projects that the caller administers")
    shared: bool = Field(description="true if it also has roles in other projects")
    created_at: Time
    created_by: str = Field(description="id of a key; `operator` is the one in $TRAINSHED_HOME/admin.key")
    expires_at: Time | None
    revoked_at: Time | None


class NewKey(BaseModel):
    """A new key and its secret."""

    key: KeyOut
    secret: str = Field(description="the key for `Authorization: Bearer`; it is not shown again")


class Keys(BaseModel):
    """Keys, newest first."""

    data: list[KeyOut]


class DeedOut(BaseModel):
    """An audit log entry: a write, its caller, and the state before and after it."""

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


class Me(BaseModel):
    """The caller: its key and its roles."""

    id: str
    name: str
    roles: dict[str, Role]
