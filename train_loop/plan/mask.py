"""Memory of the attention mask that separates documents in a packed sequence."""

from train_loop.spec import JobSpec

MASK_BYTES = 2**30
"""Maximum bytes of a mask on a GPU; above it, `auto` prefers flex_attention, which makes no mask."""


def mask_bytes(spec: JobSpec) -> int:
    """Return the bytes of the mask [sequences, 1, T, T] that sdpa needs for packed rows; 0 for other rows."""
    packed = spec.data.packing
    return spec.training.per_device_train_batch_size * spec.data.sequence_length**2 if packed else 0
