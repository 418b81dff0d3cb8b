"""Errors that trying again does not help against."""


class FencedError(RuntimeError):
    """A newer attempt has taken over: this one must not commit anything any more, and ends."""

    code = "fenced"


class RunEndedError(RuntimeError):
    """Nothing is left to do: an earlier worker group of the attempt has ended the run."""


class CheckpointError(RuntimeError):
    """A checkpoint that the run cannot do without was not committed; another attempt may find better storage."""

    code = "checkpoint_failed"


class VersionSkewError(RuntimeError):
    """The service and the cluster have different versions of Trainshed: the driver may not understand the spec."""

    code = "version_skew"


class MemoryRanOutError(RuntimeError):
    """A rank ran out of device or host memory for the first time; the run is tried once more as it is."""

    code = "out_of_memory"


class UserError(ValueError):
    """Something in the spec, the model or the data is wrong; the message says rule, value and remedy."""

    code = "user_error"


class DataError(UserError):
    """Data that cannot be trained on."""

    code = "data_error"


class ModelError(UserError):
    """A model that cannot be built or trained as asked."""

    code = "model_error"


class NonFiniteError(UserError):
    """Loss or gradients were not finite, and the spec says that this ends the run."""

    code = "nonfinite"


class TooLittleMemoryError(UserError):
    """A rank ran out of memory again without a new checkpoint in between: the spec asks for more than there is."""

    code = "out_of_memory"
