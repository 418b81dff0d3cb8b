"""Checks of a worker's devices, and of GPUs that a job leaves unused."""

import difflib
import re
from collections.abc import Mapping

from train_loop.spec import JobSpec, Problem, ScalingSpec

_HONOURED = ("CPU", "GPU", "memory")
_ACCELERATOR = re.compile(r"(tpu|npu|hpu|xpu|mlu|ipu|fpga|rbln|neuron|furiosa|metax|rocm|mps)", re.IGNORECASE)
"""Prefixes of the names that Ray or vendors give to devices on which this loop cannot train."""
_ALIKE = 0.6


def device_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems of requested resources on which a worker would not train, or not as the spec requires.

    Other names are custom resources of the cluster's nodes, as in Ray.
    """
    found, requested = list[str](), spec.scaling.resources_per_worker
    for name, amount in requested.items():
        if _ACCELERATOR.match(name):
            found.append(f"training on {name} is not supported; choose GPU, or only CPU")
        elif name not in _HONOURED and (meant := _meant(name)):
            found.append(f"unknown resource {name!r}; did you mean {meant}?")
        elif name == "GPU" and amount not in (0, 1):
            found.append(
                f"GPU: {amount:g} per worker is not supported: each worker is one rank with one device; set GPU: 1 and "
                "num_workers to the number of GPUs"
            )
    problems = [Problem("/scaling/resources_per_worker", message) for message in found]
    if requested.get("GPU") and spec.model.compile and spec.training.reproducible == "any_size":
        # Seen on an H200 with torch 2.11: Inductor's kernels of two processes gave different bits.
        problems.append(
            Problem(
                "/model/compile",
                "kernels that torch.compile makes for GPUs may give other bits in another process, so "
                "reproducible=any_size does not hold; remove compile, or choose training.reproducible=same_size",
            )
        )
    attention = spec.model.attn_implementation
    if not requested.get("GPU") and attention not in ("auto", "sdpa"):
        message = (
            f"attn_implementation={attention} needs a GPU, which a worker does not request; choose auto or sdpa, or "
        )
        problems.append(Problem("/model/attn_implementation", f"{message}add GPU: 1 to scaling.resources_per_worker"))
    return problems


def _meant(name: str) -> str | None:
    lower = {known.lower(): known for known in _HONOURED}
    near = difflib.get_close_matches(name.lower(), [*lower, "cuda"], n=1, cutoff=_ALIKE)
    return lower.get(near[0], "GPU") if near else None


def forgotten_gpu(scaling: ScalingSpec, total: Mapping[str, float]) -> str | None:
    """Return a sentence if a job trains on the CPUs of a cluster that has GPUs; None otherwise."""
    if not total.get("GPU") or scaling.resources_per_worker.get("GPU"):
        return None
    return (
        f"the job requests no GPU and trains on CPUs, but the cluster has {total['GPU']:g} GPU; add GPU: 1 to "
        "scaling.resources_per_worker"
    )
