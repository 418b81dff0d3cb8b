"""The calls about the service itself."""

from service.api.doctor_schemas import ExaminationOut
from service.client.call import Sent, operation


class ServiceCalls:
    """/doctor."""

    @operation(ExaminationOut, "POST", "/doctor")
    def doctor(self) -> Sent:
        """Examine cluster and storage, in two minutes at most."""
        return Sent()
