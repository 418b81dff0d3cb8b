"""What is wrong with somebody's data."""


class DataError(ValueError):
    """Data that cannot be trained on; trying again does not help. The message says which data and what would help."""
