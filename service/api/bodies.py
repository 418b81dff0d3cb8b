"""Request bodies: a limited size, and a model of the expected shape."""

import json
from collections import Counter
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.api.authentication import guard_of
from service.errors import BodyTooLarge, InvalidRequest
from train_loop.spec import Problem

T = TypeVar("T", bound=BaseModel)


async def read_body(request: Request) -> bytes:
    """Return the body. Count its size while reading: a chunked body does not declare it. Raises BodyTooLarge."""
    guard, parts, size = guard_of(request), list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > guard.max_body_bytes:
            raise BodyTooLarge(f"the body is over {guard.max_body_bytes} bytes; a job spec is text, send less of it")
        parts.append(part)
    return b"".join(parts)


def parse_body(kind: type[T], body: bytes) -> T:
    """Parse a body as a model; an empty body gives the defaults. Raises InvalidRequest."""
    body = body or b"{}"
    try:
        # Strict: a string that looks like a number is not accepted as a number.
        parsed = kind.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise InvalidRequest(
            [Problem("".join(f"/{part}" for part in e["loc"]), e["msg"]) for e in error.errors()]
        ) from error
    _check_names(body)
    return parsed


def _check_names(body: bytes) -> None:
    """Raise InvalidRequest if an object has a name twice: its last value would win in silence."""
    try:
        json.loads(body, object_pairs_hook=_refuse_repeated)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest([Problem("", f"invalid JSON: {error}")]) from error


def _refuse_repeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object. Raises InvalidRequest if it has a name twice."""
    if len(once := dict(pairs)) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        shown = twice[:64].encode(errors="replace").decode()
        raise InvalidRequest([Problem("", f"{shown!r} is given twice in one object; remove one")])
    return once
