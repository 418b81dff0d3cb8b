"""Errors from a model's own code: the same input would raise them again."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from train_loop.errors import ModelError, UserError
from train_loop.plan.memory.term import Place

_ELSEWHERE = (
    UserError,
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
    torch.distributed.DistError,
)
"""Errors that pass unchanged: user errors, and errors from storage, memory, a device or the network."""
_COLLECTIVES = "/torch/distributed/"
"""Path in torch whose errors come from other ranks."""
_ALLOCATORS = ("can't allocate memory", "not enough memory: you tried to allocate")
"""Messages of the RuntimeErrors from torch's allocators of host memory."""


def without_advice(error: BaseException) -> str:
    """Return an error's message in one line, without advice that does not apply: to open issues, or to use eager."""
    text = " ".join(str(error).split())
    sentences = re.split(r"(?<=[.!?])\s+", text)
    kept = [
        one
        for one in sentences
        if not re.search(r"issue|github\.com|eager|attn_implementation|from_pretrained|^Please\b", one)
    ]
    return " ".join(kept) or type(error).__name__


def full_memory(error: BaseException) -> Place | None:
    """Return which memory an error reports as full; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    allocator_failed = type(error) is RuntimeError and any(phrase in str(error) for phrase in _ALLOCATORS)
    return "host" if allocator_failed or isinstance(error, MemoryError) else None


def passes_unchanged(error: BaseException) -> bool:
    """Return whether an error that a model's code raised comes from elsewhere: storage, memory, or other ranks."""
    if isinstance(error, _ELSEWHERE) or full_memory(error) is not None:
        return True
    # Without a group of ranks, as in a preflight, there are no others.
    called = torch.distributed.is_initialized()
    return called and any(_COLLECTIVES in frame.filename for frame in traceback.extract_tb(error.__traceback__))


@contextmanager
def own_faults(model: nn.Module) -> Iterator[None]:
    """Raise ModelError, which ends the run, for errors of the model's own code in its forward pass."""
    try:
        yield
    except Exception as error:  # a model's errors have no common class
        if passes_unchanged(error):
            raise
        message = f"{type(error).__name__}: {without_advice(error)}"
        # FSDP adds its name as a prefix to the names of classes.
        name = type(model).__name__.removeprefix("FSDP")
        raise ModelError(
            f"{name} failed in its forward pass: {message}; the traceback is in this rank's log; correct "
            "the config or the data, or choose another model"
        ) from error
