"""Conversion of single values of other tools into values that this version's spec has."""

import ast
import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import JsonValue

from train_loop.spec.heads import CAUSAL_LM
from train_loop.spec.importers.draft import NotSupportedError
from train_loop.spec.names import nearest_value
from train_loop.spec.scaling import MOST_WORKERS
from train_loop.spec.schedule import SCHEDULE_OPTIONS, Schedule

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_ATTENTION = {"fa2": "flash_attention_2", "fa3": "flash_attention_3"}
_SCHEDULES = {"warmup_stable_decay": "wsd"}
_OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "sgd": "sgd",
    "adafactor": "adafactor", "adamw_8bit": "adamw_8bit", "adamw_bnb_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit", "paged_adamw_32bit": "adamw",
    "adamw_torch_xla": "adamw", "adamw_torch_npu_fused": "adamw", "adam": "adam", "lion": "lion",
    "lion_32bit": "lion", "paged_lion_32bit": "lion", "schedule_free_adamw": "schedule_free_adamw",
}  # fmt: skip
_IMAGES = re.compile("vis(?:ion|ual)")
_MOST_CHARACTERS = 4096
_MOST_DEVICES = 65536
MODEL_FOLDER = "/models"
DATA_FOLDER = "/data"


def dtype(value: Any) -> JsonValue:
    """Return a dtype in the spec's spelling; others unchanged, for the spec to refuse."""
    name = str(value).lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


def attention(value: Any) -> JsonValue:
    """Return an attention implementation in the spec's spelling."""
    return _ATTENTION.get(str(value), str(value))


def _plain(value: Any) -> str:
    """Return a name in lower case, also of a member of an enumeration: `SchedulerType.COSINE`."""
    return str(value).lower().rpartition(".")[2]


def schedule(value: Any) -> JsonValue:
    """Return a learning rate schedule that this version has."""
    name = _plain(value)
    name = _SCHEDULES.get(name, name)
    if name in get_args(Schedule):
        return name
    near = nearest_value(name, get_args(Schedule)) or "cosine"
    raise NotSupportedError(f"the schedule {value!s:.60} does not exist here, so the default applies; {near} is near")


def schedule_options(value: Any, name: Any) -> dict[str, Any]:
    """Return the options that a schedule has here."""
    known = SCHEDULE_OPTIONS.get(_SCHEDULES.get(_plain(name), _plain(name)), ())
    return {option: one for option, one in value.items() if option in known} if isinstance(value, Mapping) else {}


def optimizer(value: Any) -> JsonValue:
    """Return an optimizer that the spec has."""
    name = _plain(value)
    if name not in _OPTIMIZERS:
        raise NotSupportedError(f"the optimizer {value!s:.60} does not exist here; the job trains with adamw")
    return _OPTIMIZERS[name]


def names(value: Any) -> JsonValue:
    """Return the names of a comma-separated text or of a list."""
    return [one.strip() for one in value.split(",") if one.strip()] if isinstance(value, str) else value


def frozen(value: Any) -> JsonValue:
    """Return the prefixes of frozen modules, without towers for images, which no model has here."""
    given = names(value)
    kept: list[JsonValue] = [one for one in given if not _IMAGES.search(str(one))] if isinstance(given, list) else []
    if isinstance(given, list) and not kept:
        raise NotSupportedError("images are not supported: give the folder of the language model, which has no tower")
    return kept or given


def flag(value: Any) -> bool:
    """Return a boolean that may be written as text."""
    return value.strip().lower() in ("true", "yes", "1", "on") if isinstance(value, str) else bool(value)


def switch(value: Any) -> Any:
    """Return a boolean that may be written as text; other values unchanged."""
    return flag(value) if str(value).strip().lower() in ("true", "false") else value


def number(value: Any) -> Any:
    """Return a number that may be written as text; other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if re.fullmatch(r"[-+]?\d{1,18}", value.strip()) else float(value)
    except ValueError:
        return value


def given_number(value: Any) -> Any:
    """Return a number; `auto` leaves it to the other file of the run."""
    if str(value).strip().lower() == "auto":
        raise NotSupportedError("auto: the other file of the run decides")
    return number(value)


def no_clipping(value: Any) -> Any:
    """Return a maximum norm; 0 and less mean no clipping."""
    limit = number(value)
    return None if isinstance(limit, int | float) and limit <= 0 else limit


def job_name(value: Any) -> str:
    """Return a legal job name that is as near as possible to a text."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].strip("-")
    return name or "imported"


def model_folder(value: str) -> str:
    """Return the URI of a folder that a model of the Hub may be downloaded to."""
    return f"file://{MODEL_FOLDER}/{_last(value) or 'MODEL'}"


def data_file(value: str) -> str:
    """Return the URI of a file below a storage root with the name of a relative one."""
    return f"file://{DATA_FOLDER}/{_last(value) or 'train.jsonl'}"


def _last(path: str) -> str:
    return re.sub(r"[^\w.*-]", "_", path.rstrip("/").rpartition("/")[2])


def is_absolute(path: str) -> bool:
    """Return whether a path or URI needs no working directory."""
    return path.startswith("/") or "://" in path


def head(model_type: Any) -> str:
    """Return the head for ROLL's model_type; only the one of tokens has the columns of text alone."""
    if model_type in (None, "causal_lm"):
        return CAUSAL_LM
    raise NotSupportedError(
        f"model_type={model_type!s:.60} needs labelled rows; set model.head and data.columns (docs: heads and labels)"
    )


def devices(value: Any) -> int:
    """Return the number of devices of a list, or of ROLL's text for one: `list(range(0,8)) + [8, 9]`.

    The text is parsed and not evaluated. Raises ValueError.
    """
    if isinstance(value, list):
        return len(value)
    text = str(value)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("device_mapping is too long to read; write list(range(0, N))")
    try:
        count = _count(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        count = -1
    if not 0 < count <= MOST_WORKERS:
        raise ValueError(
            f"device_mapping={text[:80]} is not read as a list of 1 to {MOST_WORKERS} devices; write list(range(0, N))"
        )
    return count


def _count(node: ast.expr) -> int:
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return len([_integer(one) for one in elements])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _count(left) + _count(right)
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return _count(inner)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if 0 < len(args) <= 3:
            return len(range(*[_integer(one) for one in args]))
    raise ValueError("not a list of devices")


def _integer(node: ast.expr) -> int:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    if not isinstance(node, ast.Constant) or type(node.value) is not int or node.value > _MOST_DEVICES:
        raise ValueError("not a number of a device")
    return sign * node.value
