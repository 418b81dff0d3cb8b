"""What the process says on stderr: a line for people, or a JSON object for machines; libraries' words among them."""

import io
import logging
import sys
from contextlib import suppress
from enum import Enum
from typing import Literal, TextIO, cast

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, Processor

from train_loop.spec import show

LogFormat = Literal["console", "json"]


def configure_logs(kind: LogFormat, stream: TextIO = sys.stderr) -> None:
    """Say everything from here on to a stream; stdout is for the one line that says where we listen."""
    stream = cast("TextIO", _Unfailing(stream))
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    last = _renderers(kind, colors=stream.isatty())
    structlog.configure(
        processors=[*common, *last],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(stream),
        # What is looked up once is quicker: there is a line for every request.
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    named: list[Processor] = [*common, structlog.stdlib.add_logger_name]
    handler.setFormatter(
        ProcessorFormatter(foreign_pre_chain=named, processors=[ProcessorFormatter.remove_processors_meta, *last])
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)


class _Unfailing:
    """A stream whose writes never raise: a log on a full disk must not fail the request that it is about."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or lose it."""
        with suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        """Flush, or lose what is in the buffer."""
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether a person reads it."""
        return self._stream.isatty()


def _renderers(kind: LogFormat, *, colors: bool) -> list[Processor]:
    # Tracebacks without local variables: some of those are keys.
    if kind == "json":
        tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
        return [tracebacks, structlog.processors.JSONRenderer()]
    if colors:
        return [
            _escaped,
            structlog.dev.ConsoleRenderer(colors=True, timestamp_key="time", exception_formatter=_traceback),
        ]
    return [structlog.processors.ExceptionRenderer(), _line]


def _traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    stream.write(show(text.getvalue()))


def _escaped(logger: object, method: str, said: EventDict) -> EventDict:
    """Return the fields without characters that control a terminal; only events and tracebacks have several lines."""
    for name, value in said.items():
        if isinstance(value, str) and not isinstance(value, Enum):
            said[name] = show(value, lines=name in ("event", "exception"))
    return said


def _line(logger: object, method: str, said: EventDict) -> str:
    """What goes to a file: in a tenth of the time that colors take, and nothing in it that looks like another line."""
    time, level, event, exception = (said.pop(name, "") for name in ("time", "level", "event", "exception"))
    told = "".join(f" {name}={_plain(value)!r}" for name, value in said.items())
    # What `repr` shows is escaped already; a library's words and a traceback are not.
    return f"{time} [{level}] {show(str(event))}{told}" + (f"\n{show(exception)}" if exception else "")


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
