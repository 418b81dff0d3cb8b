"""Errors of the training loop with their codes."""


class FencedError(RuntimeError):
    """A newer attempt or worker group has taken over: this one must not write, and exits."""

    code = "fenced"


class RunEndedError(RuntimeError):
    """An earlier worker group of the attempt has already ended the run."""


class CheckpointError(RuntimeError):
    """A required checkpoint was not committed. A new attempt may succeed."""

    code = "checkpoint_failed"


class VersionSkewError(RuntimeError):
    """The service and the cluster have different versions of Trainshed: the driver may not understand the spec."""

    code = "version_skew"


class MemoryRanOutError(RuntimeError):
    """A rank ran out of device or host memory for the first time; the run is retried once unchanged."""

    code = "out_of_memory"


class UserError(ValueError):
    """The spec, the model or the data is invalid; the message contains rule, value and remedy."""

    code = "user_error"


class DataError(UserError):
    """Invalid training or evaluation data."""

    code = "data_error"


class ModelError(UserError):
    """A model that cannot be built, or trained as the spec asks."""

    code = "model_error"


class NonFiniteError(UserError):
    """Loss or gradients were not finite, and the spec ends the run in this case."""

    code = "nonfinite"


class TooLittleMemoryError(UserError):
    """A rank ran out of memory again without a new checkpoint in between: the spec needs too much memory."""

    code = "out_of_memory"
