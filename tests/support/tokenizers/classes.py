"""All tokenizer classes of the installed transformers, and all settings that their code reads."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

_HOME = Path(transformers.__file__).parent
_CLASS, _READ = re.compile(r"^class (\w+)\(", re.MULTILINE), re.compile(r"kwargs(?:\.(?:get|pop)\(|\[)\"(\w+)\"")


@cache
def tokenizer_classes() -> dict[str, type[PreTrainedTokenizerBase]]:
    """Return the classes by name, without those that need a library which is not installed."""
    names = {name for file in _sources() for name in _CLASS.findall(file.read_text()) if "Tokenizer" in name}
    found = {name: tokenizer_class_from_name(name) for name in sorted(names)}
    return {
        name: one for name, one in found.items() if isinstance(one, type) and issubclass(one, PreTrainedTokenizerBase)
    }


@cache
def tokenizer_settings() -> tuple[str, ...]:
    """Return the names of parameters, files and keyword arguments of all classes, and those of loading."""
    names = {name for file in _sources() for name in _READ.findall(file.read_text())}
    for one in tokenizer_classes().values():
        names |= {*inspect.signature(one).parameters, *one.vocab_files_names}
    for call in (AutoTokenizer.from_pretrained, PreTrainedTokenizerBase.from_pretrained):
        names |= inspect.signature(call).parameters.keys()
    return tuple(sorted(names - {"tokenizer_class"}))


def _sources() -> Iterator[Path]:
    yield from _HOME.glob("tokenization*.py")
    yield from _HOME.glob("models/*/tokenization*.py")
