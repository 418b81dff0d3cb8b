"""Result of a conversion. Needs no torch."""

from pydantic import BaseModel


class Converted(BaseModel):
    """A new folder with safetensors."""

    folder: str
    tensors: int
    bytes: int
    files: list[str]
    dtype: str | None
    """Name of the dtype that all tensors of floats have; None if they have several."""
    notes: list[str]
    """Names that were left out, renamed or not found."""
