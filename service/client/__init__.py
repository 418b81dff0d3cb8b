"""Deprecated alias of the package `trainshed`, for one release."""

import warnings

from trainshed import *  # noqa: F403
from trainshed import __all__ as __all__

warnings.warn("service.client is deprecated; use `from trainshed import Client`", DeprecationWarning, stacklevel=2)
