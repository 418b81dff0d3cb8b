"""/doctor: whether cluster and storage are as jobs need them."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from service.api.doctor_schemas import ExaminationOut
from service.api.guard import CallerIs
from service.doctor import Doctor
from service.domain.access import ANY, Role
from service.errors import Forbidden

router = APIRouter(tags=["operations"])


def doctor_of(request: Request, caller: CallerIs) -> Doctor:
    """The doctor, for those who look after the service. Raises Forbidden."""
    if not caller.may(Role.ADMIN, ANY):
        raise Forbidden(f"key {caller.name!r} is no admin of all projects; use the operator's key, or ask one who is")
    doctor: Doctor = request.app.state.doctor
    return doctor


@router.post("/doctor")
def examine(doctor: Annotated[Doctor, Depends(doctor_of)]) -> ExaminationOut:
    """Examine cluster and storage, with a small Ray job and files that are removed; two minutes at most."""
    return ExaminationOut.of(doctor.examine())
