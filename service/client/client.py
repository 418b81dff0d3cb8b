"""A service as Python sees it."""

from types import TracebackType

import httpx

from service.address import find_key, find_url
from service.client.api import Api

_PATIENCE_SECONDS = 60.0


class Client:
    """One service; `Client()` finds it as the command `trainshed` does.

    Every call raises ApiError, or httpx.HTTPError where nobody answers.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        patience: float = _PATIENCE_SECONDS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {key or find_key()}"}
        self._http = httpx.Client(base_url=url or find_url(), headers=headers, transport=transport)
        self.api = Api(self._http, patience)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of its connections."""
        self._http.close()
