"""The asynchronous client as a blocking one, so that one test body covers both."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from inspect import isawaitable
from typing import Any

from anyio.from_thread import BlockingPortal

from trainshed import AsyncApi, AsyncClient, AsyncJob

_WRAPPED = (AsyncApi, AsyncClient, AsyncJob)


class Blocking:
    """A wrapper of an asynchronous object whose calls wait for their result."""

    def __init__(self, portal: BlockingPortal, whole: object) -> None:
        self._portal, self._whole = portal, whole

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        return self._called(found) if callable(found) else self._shown(found)

    def _called(self, method: Callable[..., Any]) -> Callable[..., Any]:
        async def call(given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            answer = method(*given, **named)
            return await answer if isawaitable(answer) else answer

        return lambda *given, **named: self._shown(self._portal.call(call, given, named))

    def _shown(self, answer: Any) -> Any:
        if isinstance(answer, AsyncIterator):
            return self._each(answer)
        return Blocking(self._portal, answer) if isinstance(answer, _WRAPPED) else answer

    def _each(self, found: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                yield self._shown(self._portal.call(anext, found))
        except StopAsyncIteration:
            return
        finally:
            if isinstance(found, AsyncGenerator):
                self._portal.call(found.aclose)
