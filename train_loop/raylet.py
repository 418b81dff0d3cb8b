"""What is asked of Ray's node daemon by a protocol of its own: processes that are started ahead."""

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated.common_pb2 import Language
from ray.core.generated.node_manager_pb2 import PrestartWorkersRequest
from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub
from ray.core.generated.runtime_environment_pb2 import RuntimeEnvInfo

_KEPT = 365 * 86_400
"""Seconds; the end of the job ends what is left."""


def prestart(count: int, *, seconds: float) -> None:
    """Have this node start so many processes for actors with the runtime environment of this one. Raises RpcError."""
    here = ray.get_runtime_context()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == here.get_node_id())
    request = PrestartWorkersRequest(
        language=Language.PYTHON,
        job_id=bytes.fromhex(here.get_job_id()),
        runtime_env_info=RuntimeEnvInfo(serialized_runtime_env=here.get_runtime_env_string()),
        keep_alive_duration_secs=_KEPT,
        num_workers=count,
    )
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=seconds)
