"""Names and values that other tools use, and the answers to fields that a spec does not have. Torch-free."""

from train_loop.spec.names.answers import field_paths, unknown_field
from train_loop.spec.names.canonical import Spelling, canonical
from train_loop.spec.names.schema import accept_spellings
from train_loop.spec.names.spellings import AUTO, DTYPES, NODE, nearest_value
from train_loop.spec.names.table import NAMES, TO_COME, OtherName

__all__ = [
    "AUTO",
    "DTYPES",
    "NAMES",
    "NODE",
    "TO_COME",
    "OtherName",
    "Spelling",
    "accept_spellings",
    "canonical",
    "field_paths",
    "nearest_value",
    "unknown_field",
]
