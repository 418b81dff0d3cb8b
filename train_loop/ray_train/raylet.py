"""Requests to Ray's internal services: resources of nodes, prestarted processes, removal of lost nodes."""

import json
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import ray
from ray._common.network_utils import build_address
from ray._private import state
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import Language, NodeDeathInfo
from ray.core.generated.gcs_service_pb2 import UnregisterNodeRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo
from ray.train.v2._internal.constants import (
    DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE,
    RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR,
    get_env_vars_to_propagate,
)

_PROBE_SECONDS = 2.0


def this_node() -> str:
    """Return the id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def session_folder() -> str:
    """Return the folder of Ray's session on this process's host, which is removed with the session."""
    return str(ray._private.worker.global_worker.node.get_session_dir_path())


def usable(avoided: Collection[str] = ()) -> tuple[dict[str, Mapping[str, float]], dict[str, Mapping[str, float]]]:
    """Return the total and the free resources by node id; Ray updates them with a short delay.

    Draining and avoided nodes are left out. Both are sorted by id, so that every process sees the same order.
    """
    left_out = {*state.state.get_draining_nodes(), *avoided}
    total, free = state.total_resources_per_node(), state.available_resources_per_node()
    nodes = sorted(free.keys() & total.keys() - left_out)
    return {node: total[node] for node in nodes}, {node: free[node] for node in nodes}


def idle_nodes() -> dict[str, Mapping[str, float]]:
    """Return the total resources of each node that holds no placement group, by node id.

    Tasks of Ray Data may run on them; such tasks start and end on every node.
    """
    total, _ = usable()
    groups = state.state.placement_group_table().values()
    held = {node for group in groups if group["state"] != "REMOVED" for node in group["bundles_to_node_id"].values()}
    return {node: has for node, has in total.items() if node not in held}


def unreachable(nodes: Collection[str]) -> set[str]:
    """Return those of the nodes, by id, that have left or whose daemon does not accept a connection within 2 s."""
    if not nodes:
        return set()
    addresses = {
        node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]
    }
    asked = sorted(addresses.keys() & set(nodes))
    with ThreadPoolExecutor(len(asked) or 1) as pool:
        answers = pool.map(_accepts, (addresses[node] for node in asked))
        return set(nodes) - {node for node, accepts in zip(asked, answers, strict=True) if accepts}


def _accepts(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def grows() -> bool:
    """Return whether an autoscaler has reported to this cluster which nodes it can add."""
    return bool(state.state.get_max_resources_from_cluster_config())


def room_that_stays(held: Mapping[str, int], each: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the resources for a group's ranks on each node that is not draining: free ones and the group's own.

    `held` counts the group's ranks by node id; `each` are the resources of one rank.
    """
    _, stay = usable()
    return [
        {name: amount + held.get(node, 0) * each.get(name, 0.0) for name, amount in amounts.items()}
        for node, amounts in stay.items()
    ]


def own_environment() -> str:
    """Return the runtime environment of this process, as Ray serialized it."""
    return str(ray.get_runtime_context().get_runtime_env_string())


def worker_group_environment(variables: Mapping[str, str]) -> str:
    """Return the runtime environment of Ray Train's workers with these variables, as Ray will serialize it.

    Ray gives a prestarted process to an actor only if both texts are equal.
    """
    own = json.loads(own_environment())
    of_controller = {RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE}
    own["env_vars"] = own.get("env_vars", {}) | of_controller | get_env_vars_to_propagate() | dict(variables)
    return json.dumps(own, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def prestart(counts: Mapping[str, int], environment: str, *, kept_seconds: int, timeout: float) -> None:
    """Prestart `counts` processes, by node id, for actors with a runtime environment. Raises RpcError."""
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=environment),
        keep_alive_duration_secs=kept_seconds,
    )
    for node in ray.nodes():
        request.num_workers = counts.get(node["NodeID"], 0)
        if request.num_workers:
            with init_grpc_channel(build_address(node["NodeManagerAddress"], node["NodeManagerPort"])) as channel:
                NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=timeout)


def unregister_node(node_id: str, message: str, *, timeout: float = 5.0) -> None:
    """Unregister a node from Ray's control plane, as the node's daemon does when it exits. Raises RpcError.

    Ray then fails its actors and stops scheduling on it at once. If the node comes back, its daemon finds itself
    removed and exits; a supervisor restarts it.
    """
    request = UnregisterNodeRequest(
        node_id=bytes.fromhex(node_id),
        node_death_info=NodeDeathInfo(reason=NodeDeathInfo.Reason.UNEXPECTED_TERMINATION, reason_message=message),
    )
    address = ray.get_runtime_context().gcs_address
    with init_grpc_channel(address) as channel:
        NodeInfoGcsServiceStub(channel).UnregisterNode(request, timeout=timeout)
