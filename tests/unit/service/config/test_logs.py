"""Log formats `console` and `json`; each test runs a subprocess because logging is global to a process."""

import ast
import json
import re
import subprocess
import sys

PROGRAM = """
import logging, sys, warnings
import structlog
from service.domain.jobs.job import JobState
from service.config.logs import configure_logs

configure_logs(sys.argv[1])
log = structlog.get_logger()
log.debug("hidden")
log.info("reported", job="job-1", text="a\\nb", state=JobState.QUEUED)
logging.getLogger("sqlalchemy.pool").warning("a library %s", "warns")
logging.getLogger("httpx").info("hidden")
warnings.warn("careful")
def fail(secret):
    raise ValueError("it failed")
try:
    fail("hun" + "ter2")
except ValueError:
    log.exception("failed")
    logging.getLogger("uvicorn.error").exception("failed, too")
"""


def log_output(kind: str) -> str:
    """Run the program and return its log."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == ""
    assert "hidden" not in done.stderr
    assert "hunter2" not in done.stderr, "tracebacks do not show local variables"
    return done.stderr


def test_json_log_has_one_object_per_line_from_every_logger() -> None:
    lines = [json.loads(line) for line in log_output("json").splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    assert [(line["level"], line.get("logger")) for line in lines] == [
        ("info", None),
        ("warning", "sqlalchemy.pool"),
        ("warning", "py.warnings"),
        ("error", None),
        ("error", "uvicorn.error"),
    ]
    assert (lines[0]["job"], lines[0]["text"], lines[0]["state"]) == ("job-1", "a\nb", "QUEUED")
    assert lines[1]["event"] == "a library warns"
    for line in lines[-2:]:
        ((trace,),) = [line["exception"]]
        assert (trace["exc_type"], trace["exc_value"], trace["frames"][-1]["name"]) == (
            "ValueError",
            "it failed",
            "fail",
        )


def test_console_log_has_plain_lines_and_tracebacks() -> None:
    lines = log_output("console").splitlines()
    assert lines[0].endswith(r"Z [info] reported job='job-1' text='a\nb' state='QUEUED'")
    assert lines[1].endswith("Z [warning] a library warns logger='sqlalchemy.pool'")
    assert lines.count("ValueError: it failed") == 2


COLOURED = """
import io, logging
import structlog
from service.config.logs import configure_logs

class Terminal(io.StringIO):
    def isatty(self):
        return True

terminal = Terminal()
configure_logs("console", terminal)
log = structlog.get_logger()
log.warning("refused", path="/jobs/\\x1b]0;PWNED\\x07\\nforged", name="a\\u202eb c")
logging.getLogger("uvicorn.error").warning("a library\\x1b]0;PWNED\\x07")
try:
    raise ValueError("no \\x1b]0;PWNED\\x07")
except ValueError:
    log.exception("failed")
print(ascii(terminal.getvalue()))
"""


def test_console_log_shows_control_characters_escaped() -> None:
    done = subprocess.run([sys.executable, "-c", COLOURED], capture_output=True, text=True, timeout=120, check=True)
    shown = ast.literal_eval(done.stdout)
    # Colours are the only escape sequences.
    assert set(re.findall("\x1b.", shown)) == {"\x1b["}
    assert not re.search("[\x07\u202e]", shown)
    assert shown.count(r"\x1b]0;PWNED\x07") == 3
    assert "\nforged" not in shown


def test_file_log_shows_control_characters_escaped() -> None:
    program = COLOURED.replace("return True", "return False")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    shown = ast.literal_eval(done.stdout)
    assert not re.search("[\x1b\x07\u202e]", shown)
    assert "\nforged" not in shown


FLOODED = """
import asyncio, resource, socket, sys
from service.config.logs import configure_logs

configure_logs(sys.argv[1])

async def main():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, backlog=128)
    clients = [socket.socket() for _ in range(100)]
    for client in clients:
        client.setblocking(False)
        client.connect_ex(server.sockets[0].getsockname())
    opened = max(client.fileno() for client in clients) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened, opened))
    await asyncio.sleep(0.5)

asyncio.run(main())
"""


def test_connections_that_cannot_be_accepted_write_one_line_a_second() -> None:
    done = subprocess.run([sys.executable, "-c", FLOODED, "console"], capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert line.endswith("socket.accept() out of system resource: [Errno 24] Too many open files logger='asyncio'")
