"""JSON of user data, with one meaning only: no key twice in an object, and only finite numbers."""

import json
import math
import sys
from codecs import BOM_UTF8
from collections import Counter
from typing import Any

ONE_LINE = "write each row as one object in one line"
LINES_OF_LIST = f"{ONE_LINE}, as `jq -c '.[]'` writes the objects of a list"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object with these keys. Raises ValueError for a key that it has twice, as either value may be meant."""
    made = dict(pairs)
    if len(made) < len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {name!r:.60} {count} times")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON; write null")


def finite(value: float) -> float:
    """Return a number. Raises ValueError if JSON cannot write it: templates would write NaN or Infinity."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number in JSON; write null")
    return value


def _read_float(text: str) -> float:
    try:
        return finite(float(text))
    except ValueError as error:
        raise ValueError(f"the number {text:.60} is too large; write a smaller one") from error


def read_json(text: str) -> Any:
    """Return the value of JSON text. Raises ValueError, which names the fault and its column."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant, parse_float=_read_float)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg.removesuffix(' at')} at {line}column {error.colno}{_hint(text)}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply; write it with fewer levels") from error
    except ValueError as error:
        if "sys.set_int_max_str_digits" in str(error):
            raise ValueError(
                f"a number has more than {sys.get_int_max_str_digits()} digits; write it as text"
            ) from error
        raise


def _hint(text: str) -> str:
    """Return a remedy for the first line of a file that is not JSON lines."""
    if text.startswith("["):
        return f"; {LINES_OF_LIST}"
    return f"; {ONE_LINE}" if text.strip() == "{" else ""


def read_line(line: bytes) -> Any:
    """Return the value of a JSON line, which may begin with a byte order mark. Raises ValueError with the fault."""
    if b"\0" in line:
        raise ValueError("the line has null bytes, as UTF-16 has; save the file as UTF-8")
    try:
        # As json does: a lone surrogate makes only the value bad that contains it.
        return read_json(line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8; save the file as UTF-8") from error
