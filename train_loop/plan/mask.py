"""Whether documents that share a sequence are kept apart by a mask."""

from train_loop.spec import JobSpec

MASK_BYTES = 2**30
"""A mask that takes more than this on a GPU is left to flex_attention, which makes none."""


def mask_bytes(spec: JobSpec) -> int:
    """Bytes of the mask [sequences, 1, T, T] that sdpa needs for packed rows; 0 for others."""
    packed = spec.data.packing
    return spec.training.per_device_train_batch_size * spec.data.sequence_length**2 if packed else 0
