"""Response models of `GET /nodes`."""

from typing import Literal

from pydantic import BaseModel, Field

from service.api.schemas.common import Time

NodeState = Literal["alive", "draining", "dead"]
"""As in service.nodes, which the client must not import."""


class NodeFailure(BaseModel):
    """A failure of a host or of workers on it."""

    time: Time
    message: str


class NodeOut(BaseModel):
    """A node of the cluster."""

    id: str
    host: str = Field(description="hostname, or the address if Ray does not know the hostname")
    address: str
    is_head: bool
    state: NodeState = Field(
        description="draining: a preemption notice was received, and new jobs are not placed there; dead: in the last "
        "hour, and its host has not joined again"
    )
    since: Time = Field(description="when it joined, when the notice came, or when it died")
    total: dict[str, float]
    free: dict[str, float] | None = Field(description="unreserved resources, up to 5 s old; null if unknown or dead")
    jobs: list[str] = Field(description="jobs with workers there that the caller may see")
    last_failure: NodeFailure | None = Field(description="the newest loss of the host or of workers on it")


class NodesOut(BaseModel):
    """Nodes of the cluster: living ones, head first, then dead ones."""

    data: list[NodeOut]
