"""/nodes: hosts of the cluster."""

from fastapi import APIRouter, Depends

from service.api.authentication import CallerIs, require_key
from service.api.convert import node_out
from service.api.routes.jobs import UseCases
from service.api.schemas import NodesOut
from service.use_cases.doctor.nodes import list_nodes

router = APIRouter(tags=["nodes"], dependencies=[Depends(require_key)])


@router.get("/nodes")
def nodes(caller: CallerIs, jobs: UseCases) -> NodesOut:
    """List hosts with state, free capacity, jobs and last failure. Dead hosts are listed for an hour."""
    return NodesOut(data=[node_out(view) for view in list_nodes(caller, jobs)])
