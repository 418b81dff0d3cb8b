"""Crash states of object storage: the requests of a real program, cut at every instant.

Requests are atomic, and each process sends one at a time. So a crash leaves the effects of all answered requests, with
or without the effect of the one request that each process had in flight.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem


class Request(NamedTuple):
    """One change of the stored objects."""

    at: int
    """Nanoseconds of a clock that all processes share, when the request was answered."""
    kind: str
    """put or delete; or `durable`, the report that a step is durable."""
    key: str
    content: bytes = b""


class RequestTrace:
    """A record of this process's changes below a prefix while `patch` is active."""

    def __init__(self, patch: pytest.MonkeyPatch, prefix: str) -> None:
        self.requests: list[Request] = []
        self._prefix = prefix
        call = S3FileSystem._call_s3

        async def call_and_record(system: S3FileSystem, method: str, *parts: dict[str, Any], **rest: Any) -> Any:
            answer = await call(system, method, *parts, **rest)
            parameters = {name: value for part in parts for name, value in part.items()} | rest
            self._record(method, parameters)
            return answer

        patch.setattr(S3FileSystem, "_call_s3", call_and_record)
        # Opened files call this one.
        patch.setattr(S3FileSystem, "call_s3", sync_wrapper(call_and_record))

    def report_durable(self, step: int) -> None:
        """Record that a step was reported as durable."""
        self.requests.append(Request(time.monotonic_ns(), "durable", str(step)))

    def _record(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "put_object":
                self._add("put", parameters["Key"], bytes(parameters.get("Body", b"")))
            case "delete_object":
                self._add("delete", parameters["Key"])
            case "delete_objects":
                for thing in parameters["Delete"]["Objects"]:
                    self._add("delete", thing["Key"])
            case "create_multipart_upload" | "copy_object":
                raise AssertionError(f"the model of the storage knows no {method}")

    def _add(self, kind: str, key: str, content: bytes = b"") -> None:
        if key.startswith(self._prefix):
            self.requests.append(Request(time.monotonic_ns(), kind, key.removeprefix(self._prefix), content))


class Found(NamedTuple):
    """One state after a crash."""

    objects: dict[str, bytes]
    promised: frozenset[int]
    name: str


def found_after_crashes(traces: Sequence[Sequence[Request]]) -> Iterator[Found]:
    """Yield each possible state once."""
    order = sorted((request, number) for number, trace in enumerate(traces) for request in trace)
    seen = set[tuple[object, ...]]()
    objects, promised = dict[str, bytes](), frozenset[int]()
    for count, (request, _) in enumerate(order, start=1):
        if request.kind == "durable":
            promised |= {int(request.key)}
        else:
            _do(objects, request)
        under_way = [_next(order[count:], number) for number in range(len(traces))]
        for chosen in itertools.product((False, True), repeat=len(traces)):
            there = dict(objects)
            for one in (ahead for ahead, done in zip(under_way, chosen, strict=True) if done and ahead is not None):
                _do(there, one)
            mark = (promised, *sorted((key, hash(content)) for key, content in there.items()))
            if mark not in seen:
                seen.add(mark)
                yield Found(there, promised, f"after request {count} of {len(order)} and {sum(chosen)} under way")


def _next(ahead: Sequence[tuple[Request, int]], process: int) -> Request | None:
    """Return the next request of a process, whose answer it cannot have received."""
    following = next((request for request, number in ahead if number == process), None)
    return None if following is None or following.kind == "durable" else following


def _do(objects: dict[str, bytes], request: Request) -> None:
    if request.kind == "put":
        objects[request.key] = request.content
    else:
        objects.pop(request.key, None)
