"""The FSDP units of a model, by class."""

from dataclasses import dataclass


@dataclass(frozen=True)
class UnitGroup:
    """FSDP units of one class and size, which gather and reduce their parameters together."""

    module: str
    """Class of the module."""
    count: int
    parameters: int
    """Parameters of one unit, without those of units inside of it."""
    bytes: int
    """Bytes of one unit's gathered parameters."""
    dtype: str
    """dtype in which the unit computes."""


@dataclass(frozen=True)
class UnitTree:
    """The FSDP units of a model, and its modules as `print(model)` shows them after `fully_shard`."""

    units: tuple[UnitGroup, ...]
    tree: str
    """Modules, one a line; the names of units begin with FSDP."""
