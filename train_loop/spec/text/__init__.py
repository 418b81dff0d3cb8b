"""YAML and JSON text of specs: its data, within limits, and the positions of its fields."""

from train_loop.spec.text.document import read_positions, read_yaml
from train_loop.spec.text.limits import MAX_DEPTH, MAX_NODES, MAX_YAML_BYTES, Position, as_pointer, check_data
from train_loop.spec.text.positions import add_positions, describe, locate

__all__ = [
    "MAX_DEPTH",
    "MAX_NODES",
    "MAX_YAML_BYTES",
    "Position",
    "add_positions",
    "as_pointer",
    "check_data",
    "describe",
    "locate",
    "read_positions",
    "read_yaml",
]
