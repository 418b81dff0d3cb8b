"""The config of a spec in its class of transformers, and why that fails in words of the config, not of its code."""

import difflib
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from train_loop.errors import ModelError
from train_loop.model.faults import without_advice
from train_loop.model.folder import model_config
from train_loop.spec import LabelHeadSpec, ModelSpec

SOURCE = f"transformers {transformers.__version__}"
_UNDECLARED = ("head_dim", "rope_theta", "rope_type", "partial_rotary_factor")
"""Fields that transformers reads although not every config class declares them."""
_OF_TOKEN_HEADS = ("classifier_dropout",)
"""Fields that heads of a label per token read, 0.1 without it."""
_TYPE = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>")
_FIELDS = 3
"""Number of fields that are shown: the last ones that the code read before it failed."""
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
_SHOWN = 80
"""Maximum characters of a value that is shown."""


def read_config(spec: ModelSpec) -> Any:
    """Return the config of a spec's model, or of its folder. Raises ModelError."""
    return _hf_config(model_config(spec), spec.label_head) if spec.config is not None else _folder_config(spec)


def _hf_config(config: dict[str, Any], head: LabelHeadSpec | None) -> Any:
    """Return the config in its transformers class. Raises ModelError for a field that the class does not have.

    transformers itself keeps a misspelled field and trains with the default.
    """
    hf_config = _config_of_type(config)
    known = {*dir(type(hf_config)), *_UNDECLARED, *([] if head is None or head.pools else _OF_TOKEN_HEADS)}
    for name in sorted(config.keys() - known):
        remedy = f"set model.{name}" if name in ModelSpec.model_fields else _near(name, known) or "remove it"
        raise ModelError(f"{type(hf_config).__name__} has no field {name}; {remedy}")
    return hf_config


def _config_of_type(config: dict[str, Any]) -> Any:
    kind = config["model_type"]
    if kind not in CONFIG_MAPPING:
        remedy = _near(kind, CONFIG_MAPPING) or "choose a supported one, for example qwen3 or llama"
        raise ModelError(f"{SOURCE} does not support model_type={kind}; {remedy}")
    return AutoConfig.for_model(**config)


def _near(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else None


def _folder_config(spec: ModelSpec) -> Any:
    """Return the config of a folder.

    It may have any field, because transformers writes more fields than its classes declare.
    """
    config = model_config(spec)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        kind = f" ({method})" if isinstance(method, str) else ""
        raise ModelError(f"{spec.path} holds quantised weights{kind}, which cannot be trained; give the original model")
    # Code that comes with a model is never run. Many folders contain code although transformers has the model too.
    if config.pop("auto_map", None) and config["model_type"] not in CONFIG_MAPPING:
        raise ModelError(
            f"{spec.path} needs custom code (auto_map), and the code in a model's folder is not run; choose a model "
            "that transformers supports"
        )
    return _config_of_type(config)


def stated(error: BaseException) -> str | None:
    """Return what transformers itself says about a config; None for an error that its code only ran into."""
    if isinstance(error, StrictDataclassError):
        # Its own text names the validator's function, and the cause names the modules of types.
        said = str(error.__cause__ or error).partition(" Errors:")[0]
        return without_advice(ValueError(_TYPE.sub(r"\1", said).replace("NoneType", "null"))).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    text = error.args[0] if error.args else None
    if not frames or not isinstance(text, str) or " " not in text or not _is_raised_by_transformers(frames[-1]):
        return None
    return without_advice(ValueError(text)).rstrip(".")


def _is_raised_by_transformers(frame: traceback.FrameSummary) -> bool:
    return "/transformers/" in frame.filename and (frame.line or "").startswith(("raise", "assert"))


def with_values(error: BaseException, again: Callable[[], object], *, of: type) -> str:
    """Return the config's values with which the code of a model fails, such as "with hidden_act='gleu'".

    `again` repeats what failed, and `of` is the class of all configs. Returns "with this config" if no value is known.
    """
    reads = list[_Read]()
    try:
        with _recorded(reads, of):
            again()
    except Exception as repeated:  # it has no common class
        error = repeated
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((code for code in reversed(codes) if any(read.code is code for read in reads)), None)
    own = [read for read in reads if read.code is innermost]
    absent = [read for read in own if read.value is None] if "None" in str(error) else []
    named = _padding_outside(reads) or {read.name: read.value for read in absent or own[-_FIELDS:]}
    values = [f"{name}={_short(value)}" for name, value in named.items()]
    return f"with {' and '.join(values)}" if values else "with this config"


def why_not_called(error: BaseException | None, config: object) -> str:
    """Return why a model that was built cannot be called, as an end of a sentence."""
    said = None if error is None else stated(error)
    if said is None:
        sizes = {name: getattr(config, name, None) for name in _SIZES}
        values = [f"{name}={_short(value)}" for name, value in sizes.items() if value is not None]
        verdict = "its sizes do not fit each other" if isinstance(error, RuntimeError) else "check its fields"
        said = f"{verdict}: {', '.join(values)}"
    return f": {said}"


def _padding_outside(reads: Sequence["_Read"]) -> dict[str, Any]:
    """Return the padding token and the size of the vocabulary if the token lies outside."""
    read = {one.name: one.value for one in reads}
    pad, vocab = read.get("pad_token_id"), read.get("vocab_size")
    outside = isinstance(pad, int) and isinstance(vocab, int) and pad >= vocab
    return {"pad_token_id": pad, "vocab_size": vocab} if outside else {}


class _Read(NamedTuple):
    """A read of a config's field: name, value, and the code that read it."""

    name: str
    value: Any
    code: CodeType


@contextmanager
def _recorded(reads: list[_Read], of: Any) -> Iterator[None]:
    """Record which fields of configs are read within the context."""
    plain = of.__getattribute__

    def read(self: object, name: str) -> Any:
        missing = True
        try:
            value = plain(self, name)
            missing = False
        finally:
            if missing or name in getattr(type(self), "__dataclass_fields__", ()):
                reads.append(_Read(name, None if missing else value, sys._getframe(1).f_code))
        return value

    of.__getattribute__ = read
    try:
        yield
    finally:
        of.__getattribute__ = plain


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
