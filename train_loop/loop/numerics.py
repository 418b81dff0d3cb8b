"""torch's settings of a process that change how it computes: fp32 products, and deterministic algorithms."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train_loop.errors import UserError
from train_loop.spec import JobSpec

_WITHOUT = re.compile(r"(.+?) does not have a deterministic implementation")
"""torch's error, with the operation as its group."""


@contextmanager
def numerics(spec: JobSpec) -> Iterator[None]:
    """Apply a spec's matmul_precision and deterministic within the context; the former settings come back after it.

    Raises UserError for an operation without a deterministic kernel.
    """
    matmul, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_float32_matmul_precision(spec.strategy.matmul_precision)
    torch.use_deterministic_algorithms(spec.training.deterministic)
    try:
        yield
    except Exception as error:
        operation = _without_kernel(error) if spec.training.deterministic else None
        if operation is None:
            raise
        raise UserError(
            f"training.deterministic: true, but {operation} has no deterministic kernel on this device; set "
            "training.deterministic: false, or choose a model or settings that do not use it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(matmul)


def _without_kernel(error: BaseException | None) -> str | None:
    """Return the operation of torch's error, which errors of the model's code may wrap; None for other errors."""
    operation = None
    while error is not None:
        found = _WITHOUT.search(str(error))
        operation = found[1] if found else operation
        error = error.__cause__
    return operation
