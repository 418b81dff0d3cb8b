"""Load generator that submits the same job over 8 connections.

Run as `python -m benchmarks.control_plane.accepts_run OUT URL KEY SPEC COUNT`.

OUT receives the seconds and the ids of accepted jobs, also if the service stops answering.
"""

import http.client
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

CONNECTIONS = 8


def main() -> None:
    """Submit the jobs, and write the seconds and ids."""
    out, url, key, spec, count = sys.argv[1:]
    body, ids = Path(spec).read_bytes(), [list[str]() for _ in range(CONNECTIONS)]
    each = int(count) // CONNECTIONS
    threads = [threading.Thread(target=send, args=(url, key, body, each, ids[n])) for n in range(CONNECTIONS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    Path(out).write_text(json.dumps({"seconds": seconds, "ids": [job_id for some in ids for job_id in some]}))


def send(url: str, key: str, body: bytes, count: int, ids: list[str]) -> None:
    """Submit `count` jobs one after another, until the service stops answering."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    # The benchmark may kill the service meanwhile.
    with suppress(OSError, http.client.HTTPException):
        for _ in range(count):
            connection.request("POST", "/jobs", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 201:
                raise SystemExit(f"{answer.status}: {content[:300]!r}")
            ids.append(json.loads(content)["id"])


if __name__ == "__main__":
    main()
