"""`python -m tests.support.servers.quick_preflight SOCKET`: a preflight helper that only reads the model's sizes."""

import sys
from dataclasses import asdict
from typing import Any

from train_loop.plan import read_shape
from train_loop.preflight.fork_server import serve


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of the spec's model, and no problems."""
    return {"problems": [], "shape": asdict(read_shape(question["spec"]["model"]["config"]))}


if __name__ == "__main__":
    serve(sys.argv[1], answer)
