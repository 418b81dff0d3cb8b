"""Request and response models of the REST API, for users of the client: `from trainshed.models import KeyIn`."""

from service.api.schemas import *  # noqa: F403
from service.api.schemas import __all__ as __all__
