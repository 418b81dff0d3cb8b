"""/doctor: checks of cluster and storage."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from service.api.authentication import CallerIs
from service.api.convert import examination_out
from service.api.schemas import ExaminationOut
from service.domain.access.roles import ANY, Role
from service.errors import Forbidden
from service.use_cases.doctor.doctor import Doctor

router = APIRouter(tags=["operations"])


def doctor_of(request: Request, caller: CallerIs) -> Doctor:
    """Return the doctor. Raises Forbidden if the caller is not an admin of all projects."""
    if not caller.has_role(Role.ADMIN, ANY):
        raise Forbidden(
            f"key {caller.name!r} is not an admin of all projects; use the operator's key or ask such an admin"
        )
    doctor: Doctor = request.app.state.doctor
    return doctor


@router.post("/doctor")
def examine(doctor: Annotated[Doctor, Depends(doctor_of)]) -> ExaminationOut:
    """Check cluster and storage with a small Ray job and temporary files. Takes at most two minutes."""
    return examination_out(doctor.examine())
