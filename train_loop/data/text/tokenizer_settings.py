"""Settings in the JSON files of a tokenizer folder. None may name a file, because transformers opens such files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_loop.errors import DataError

_REPLACED = {
    *("_name_or_path", "is_local", "local_files_only", "name_or_path", "special_tokens_map_file", "tokenizer_file")
}
"""Settings of tokenizer_config.json that transformers replaces or never reads.

Published folders have those of the machine that saved them.
"""
_PLACES = re.compile(
    r"(.*_)?(file|files|path|dir|folder|vocab)|config|init_inputs|is_local|local_files_only|mecab_option|merges"
    r"|model_proto|proxies|revision|rewriting_rules|subfolder|token|tokenizer_object"
)
"""Settings that make a tokenizer class open other files or replace its vocabulary."""
_TOKENS = re.compile(r".*_tokens?|added_tokens_decoder|never_split")
"""Settings whose texts are tokens, at any depth. Many tokens hold a slash: `</s>`."""
_TEXTS = re.compile(r"auto_map|chat_template|response_(schema|template)|.*_version")
"""Settings that hold any text. Code in `auto_map` is not run."""
_PLACE = re.compile(r"[~.].*|.*[/\\\0].*|\S+\.[A-Za-z]\w{0,9}", re.DOTALL)
"""Texts that can name a file: with a slash, or with the ending of a file's name."""
_DATA = {"entity_vocab", "merges", "vocab"}
"""Settings that some classes save as they are, and open if they are names."""
_EMPTY: tuple[object, ...] = (None, "", [], {})


def check_settings(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings, without any that transformers replaces. Raises DataError for one that can name a file.

    Flags, numbers, tokens, templates and plain words pass, under any other name and at any depth.
    """
    replaced = _REPLACED if file.name == "tokenizer_config.json" else set[str]()
    kept = {key: value for key, value in settings.items() if key not in replaced}
    for name in _places(kept):
        raise DataError(
            f"{file.name} in {file.parent} sets {name}, which can name files outside the folder; save the tokenizer "
            "again with transformers"
        )
    return kept


def _places(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the settings that can name a file, in their order."""
    rest = [(key, key, value, False) for key, value in reversed(settings.items())]
    while rest:
        name, key, value, is_token = rest.pop()
        is_token = is_token or _TOKENS.fullmatch(key) is not None
        if value in _EMPTY or _TEXTS.fullmatch(key):
            continue
        if (key == "fast_tokenizer_files" and _are_names(value)) or (key in _DATA and _is_data(value)):
            continue
        if _PLACES.fullmatch(key) or (isinstance(value, str) and not is_token and _PLACE.fullmatch(value)):
            yield name
        elif isinstance(value, dict):
            rest += [(f"{name}.{one}", one, inner, is_token) for one, inner in reversed(value.items())]
        elif isinstance(value, list):
            rest += [(name, "", inner, is_token) for inner in reversed(value)]


def _is_data(value: object) -> bool:
    """Return whether a value is a vocabulary or its merges: an object, or a list of pairs."""
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(pair, list) for pair in value))


def _are_names(value: object) -> bool:
    """Return whether a value is a list of names of files in the folder itself."""
    return isinstance(value, list) and all(isinstance(name, str) and Path(name).name == name for name in value)
