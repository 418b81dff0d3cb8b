"""API calls for checks and nodes."""

from service.api.schemas import ExaminationOut, NodesOut
from service.client.call import Sent, operation


class ServiceCalls:
    """Calls of /doctor and /nodes."""

    @operation(ExaminationOut, "POST", "/doctor")
    def doctor(self) -> Sent:
        """Check cluster and storage. Takes at most two minutes."""
        return Sent()

    @operation(NodesOut, "GET", "/nodes")
    def nodes(self) -> Sent:
        """List hosts with state, free capacity, jobs and last failure."""
        return Sent()
