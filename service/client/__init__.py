"""The typed Python client; docs/client.md shows how it is used."""

from service.client.api import Api, AsyncApi
from service.client.client import Client
from service.client.errors import ApiError
from service.client.run_calls import Line

__all__ = ["Api", "ApiError", "AsyncApi", "Client", "Line"]
