"""The calls about the service itself."""

from service.api.doctor_schemas import ExaminationOut
from service.api.node_schemas import NodesOut
from service.client.call import Sent, operation


class ServiceCalls:
    """/doctor and /nodes."""

    @operation(ExaminationOut, "POST", "/doctor")
    def doctor(self) -> Sent:
        """Examine cluster and storage, in two minutes at most."""
        return Sent()

    @operation(NodesOut, "GET", "/nodes")
    def nodes(self) -> Sent:
        """List hosts with state, free capacity, jobs and last failure."""
        return Sent()
