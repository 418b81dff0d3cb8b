"""/schemas/job.json: the JSON schema of the job spec, for editors; it needs no key."""

from functools import cache

from fastapi import APIRouter, Response

from service.api.openapi import Answers
from service.api.query_parameters import CHECKED
from train_loop.spec import dump_schema

router = APIRouter(prefix="/schemas", tags=["schemas"], dependencies=[CHECKED])
_CACHED = "public, max-age=3600"
"""Editors and proxies may keep the schema for an hour: it changes only with the version of the service."""
_MEDIA_TYPE = "application/schema+json"
_ANSWER: Answers = {
    200: {
        "description": "JSON schema, draft 2020-12",
        "content": {_MEDIA_TYPE: {"schema": {"type": "object"}}},
        "headers": {
            "Cache-Control": {
                "description": "how long the schema may be cached",
                "required": True,
                "schema": {"type": "string"},
            }
        },
    }
}


@router.get("/job.json", response_class=Response, responses=_ANSWER)
async def job_schema() -> Response:
    """Get the JSON schema of the job spec. YAML language servers read it to check specs while they are written."""
    return Response(_schema(), headers={"Cache-Control": _CACHED}, media_type=_MEDIA_TYPE)


@cache
def _schema() -> bytes:
    return dump_schema().encode()
