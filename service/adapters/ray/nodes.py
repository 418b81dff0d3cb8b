"""Nodes of a Ray cluster, from the JSON of its dashboard.

Ray 2.60's dashboard does not report that a node drains. The State API leaves out `state_snapshot`, `/nodes` caches it
when the node joins, and `/api/cluster_status` has no such field. Only the GCS knows, so the service reads it from its
jobs' preemption notices instead. Ray terminates a draining node at once if it is idle.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from service.ports import Node

Get = Callable[[str], str]
"""Function that returns the body of the dashboard's answer for a path. It raises unless the status is 200."""
NODES, SUMMARY, USAGE = "/api/v0/nodes?detail=1&limit=10000", "/nodes?view=summary", "/api/cluster_status"
_NOT_TOTALS = ("node:", "object_store_memory")
_GROUP = re.compile(r"_group_([0-9]+_)?[0-9a-f]{16,}$")


class RayNode(BaseModel):
    """A node of the State API."""

    state: str
    node_id: str = ""
    node_ip: str = ""
    node_name: str = ""
    is_head_node: bool = False
    state_message: str | None = None
    resources_total: dict[str, float] = {}
    start_time_ms: int | None = None
    end_time_ms: int | None = None

    @property
    def resources(self) -> dict[str, float]:
        """Return the resources that jobs can request."""
        named = self.resources_total.items()
        return {name: amount for name, amount in named if not name.startswith(_NOT_TOTALS) and not _GROUP.search(name)}


class _Nodes(BaseModel):
    result: list[RayNode]


class _NodesData(BaseModel):
    result: _Nodes


class _NodesAnswer(BaseModel):
    data: _NodesData


class _Raylet(BaseModel):
    id: str = Field(alias="nodeId")
    host: str = Field(default="", alias="nodeManagerHostname")


class _Gpu(BaseModel):
    total: int = Field(alias="memoryTotal", ge=0)
    """MiB."""
    name: str = ""


class _Summary(BaseModel):
    raylet: _Raylet
    mem: list[float] = []
    """Bytes: total, available, percent, used; empty until the node's agent has reported."""
    gpus: list[_Gpu] = []

    @field_validator("mem", "gpus", mode="wrap")
    @classmethod
    def _or_unknown(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        """Treat values that another version of Ray reports otherwise as unknown."""
        try:
            return read(value)
        except ValidationError:
            return []


class _SummaryData(BaseModel):
    summary: list[_Summary]


class _SummaryAnswer(BaseModel):
    data: _SummaryData


def read_ray_nodes(get: Get) -> list[RayNode]:
    """Return all nodes that Ray remembers, including dead ones. Raises what `get` raises, and ValueError."""
    return _NodesAnswer.model_validate_json(get(NODES)).data.result.result


def read_nodes(get: Get, hosts: dict[str, str]) -> list[Node]:
    """Return all nodes with host names and free resources. Raises what `get` raises, and ValueError.

    `hosts` caches host names by node id, because Ray forgets the name of a dead node.
    """
    found = read_ray_nodes(get)
    summary = _SummaryAnswer.model_validate_json(get(SUMMARY)).data.summary
    hosts |= {one.raylet.id: one.raylet.host for one in summary if one.raylet.host}
    for gone in hosts.keys() - {node.node_id for node in found}:
        del hosts[gone]
    usage = _usage(get)
    reports = {one.raylet.id: one for one in summary}
    return [_node(node, hosts, usage, reports.get(node.node_id)) for node in found]


def _node(node: RayNode, hosts: Mapping[str, str], usage: Mapping[str, Any], report: _Summary | None) -> Node:
    alive = node.state == "ALIVE"
    memory, gpus = (report.mem, report.gpus) if report is not None else ([], [])
    return Node(
        id=node.node_id,
        host=hosts.get(node.node_id) or node.node_name or node.node_ip,
        address=node.node_ip,
        alive=alive,
        is_head=node.is_head_node,
        total=node.resources,
        free=_free(node.resources, usage.get(node.node_id)) if alive else None,
        started_at=(node.start_time_ms or 0) / 1000,
        ended_at=None if alive else (node.end_time_ms or 0) / 1000,
        message=node.state_message,
        memory=int(memory[0]) if memory else None,
        gpu_memory=tuple(gpu.total * 2**20 for gpu in gpus) or None,
        gpu=_one_name(gpus),
        object_store=int(node.resources_total.get("object_store_memory", 0)),
    )


def _one_name(gpus: Sequence[_Gpu]) -> str | None:
    names = {gpu.name for gpu in gpus if gpu.name}
    return names.pop() if len(names) == 1 else None


def _usage(get: Get) -> Mapping[str, Any]:
    """Return [used, total] of each resource of each node, up to five seconds old; empty if Ray does not report it."""
    with suppress(ValidationError, ValueError, LookupError, TypeError, AttributeError):
        return _Usage.model_validate_json(get(USAGE)).data["clusterStatus"]["loadMetricsReport"]["usageByNode"] or {}
    return {}


class _Usage(BaseModel):
    data: dict[str, Any]


def _free(total: Mapping[str, float], usage: object) -> dict[str, float] | None:
    if not isinstance(usage, dict):
        return None
    # The dashboard writes the names of resources in camel case.
    used = {_bare(name): pair[0] for name, pair in usage.items() if isinstance(pair, list) and pair}
    return {name: max(amount - float(used.get(_bare(name), 0.0)), 0.0) for name, amount in total.items()}


def _bare(name: str) -> str:
    return re.sub(r"[^0-9a-z]", "", name.lower())
