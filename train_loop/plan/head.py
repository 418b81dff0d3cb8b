"""The choice between whole logits and chunks, by the memory of `[tokens, vocab]`."""

from train_loop.plan.shape import ModelShape
from train_loop.spec import JobSpec

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
CHUNK_BYTES = 2**29
"""Maximum bytes of the logits of a chunk, including their gradient."""


def logits_row_bytes(spec: JobSpec, shape: ModelShape) -> int:
    """Return the bytes of one token's logits: in compute dtype, in fp32, and their fp32 gradient."""
    return (DTYPE_BYTES[spec.strategy.param_dtype] + 8) * shape.vocab


def chunk_rows(spec: JobSpec, shape: ModelShape, *, tokens: int) -> int | None:
    """Return the tokens in a chunk of logits; None if whole logits need less memory, or if the spec disables chunks.

    `tokens` counts one rank's part of a micro-batch. Chunks keep the head's gradient in fp32 until backward.
    """
    row = logits_row_bytes(spec, shape)
    rows = max(1, min(tokens, CHUNK_BYTES // row))
    saves = rows * row + 4 * shape.vocab * shape.hidden < tokens * row
    wanted = spec.training.chunked_loss
    return rows if (saves if wanted is None else wanted) else None
