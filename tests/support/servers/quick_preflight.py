"""`python -m tests.support.servers.quick_preflight`: a preflight helper that only reads sizes, and results."""

from dataclasses import asdict
from typing import Any

from train_loop.plan import read_shape
from train_loop.preflight.process.fork_server import serve


def answer(question: dict[str, Any]) -> dict[str, Any] | bytes:
    """Return a page of results, or the sizes of the spec's model, and no problems."""
    if "results" in question:
        from train_loop.data.read_results import answer_page  # noqa: PLC0415 - few services have results

        return answer_page(question["results"])
    return {"problems": [], "shape": asdict(read_shape(question["spec"]["model"]["config"]))}


if __name__ == "__main__":
    serve(answer)
