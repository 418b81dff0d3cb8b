"""The FSDP units of a model by class, and its linear modules that compute in float8."""

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


@dataclass(frozen=True)
class Float8Linears:
    """Linear modules in a model's layers that compute in float8."""

    scaling: str
    """`tensorwise` or `rowwise`: the values that share a scale."""
    names: tuple[str, ...]
    values: int
    """Values of their weights."""
    left_out: tuple[str, ...]
    """Linear modules that keep their dtype, because a size is no multiple of 16."""
