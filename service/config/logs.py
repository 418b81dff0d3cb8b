"""Logging of the process and of its libraries to stderr: a text line or a JSON object per entry."""

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

_INVALID = "Invalid HTTP request received."
_NOT_ACCEPTED = "socket.accept() out of system resource"
"""Beginning of asyncio's error if the process has too many open files: one for each connection that waits."""
LogFormat = Literal["console", "json"]


def configure_logs(kind: LogFormat, stream: TextIO = sys.stderr) -> None:
    """Log to a stream from now on; stdout has only the line with the service's URL."""
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
        # Caching matters because every request writes a line.
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    named: list[Processor] = [*common, structlog.stdlib.add_logger_name]
    handler.setFormatter(
        ProcessorFormatter(foreign_pre_chain=named, processors=[ProcessorFormatter.remove_processors_meta, *last])
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("uvicorn.error").addFilter(_OnePerSecond(_INVALID))
    logging.getLogger("asyncio").addFilter(_OnePerSecond(_NOT_ACCEPTED))
    logging.captureWarnings(capture=True)


class _OnePerSecond(logging.Filter):
    """A filter of messages that anyone who may connect can cause: at most one a second, in one line."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning
        self._at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record; its traceback becomes the name of its error."""
        if not str(record.msg).startswith(self._beginning):
            return True
        if record.created - self._at < 1.0:
            return False
        self._at = record.created
        if record.exc_info:
            record.msg, record.args = "%s: %s", (self._beginning, record.exc_info[1])
            record.exc_info = None
        return True


class _Unfailing:
    """A stream whose writes never raise: a full disk under the log must not fail requests."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it on an error."""
        with suppress(OSError):
            return self._stream.write(text)
        return 0

    def flush(self) -> None:
        """Flush the buffer, or drop it on an error."""
        with suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()


def _renderers(kind: LogFormat, *, colors: bool) -> list[Processor]:
    # Tracebacks without local variables, which may contain keys.
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


def _escaped(logger: object, method: str, event_dict: EventDict) -> EventDict:
    """Escape control characters in the fields; only events and tracebacks may have several lines."""
    for name, value in event_dict.items():
        if isinstance(value, str) and not isinstance(value, Enum):
            event_dict[name] = show(value, lines=name in ("event", "exception"))
    return event_dict


def _line(logger: object, method: str, event_dict: EventDict) -> str:
    """Format a line without colors, ten times as fast as with them; no value can forge another log line."""
    time, level, event, exception = (event_dict.pop(name, "") for name in ("time", "level", "event", "exception"))
    fields = "".join(f" {name}={_plain(value)!r}" for name, value in event_dict.items())
    # `repr` escapes values; messages of libraries and tracebacks need `show`.
    return f"{time} [{level}] {show(str(event))}{fields}" + (f"\n{show(exception)}" if exception else "")


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
