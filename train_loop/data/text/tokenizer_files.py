"""The files of a tokenizer folder, and a private copy of them for transformers to load."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from train_loop.errors import DataError
from train_loop.system.input_files import read_input

# All files that a tokenizer class of transformers reads from a folder; config.json can choose the class.
_NAMES = re.compile(
    r"tokenizer.*\.json|vocab.*|merges\.txt|bpe\.codes|dict\.txt|chat_template\.jinja|.*\.(model|tiktoken|tokenizer)"
    r"|(config|special_tokens_map|added_tokens|tekken|normalizer|emoji|byte_maps|entity_vocab|target_vocab)\.json"
)
TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates that are not the default."""
_LARGEST = 512 * 2**20
"""Maximum bytes of a tokenizer's files; the largest published ones have 50 MB."""
_OBJECTS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json"}
_PATHS = {"gguf_file", "init_inputs", "merges", "tokenizer_object", "vocab"}
"""Settings that make a tokenizer class open other files or replace its vocabulary."""


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file that determines a tokenizer, by its path in the folder, in name order.

    Raises DataError for files that the read policy refuses, and OSError for unreadable ones.
    """
    files = {file.name: file for file in folder.iterdir() if _NAMES.fullmatch(file.name) and file.is_file()}
    files |= {f"{TEMPLATES}/{file.name}": file for file in (folder / TEMPLATES).glob("*.jinja") if file.is_file()}
    size = sum(file.stat().st_size for file in files.values())
    if size > _LARGEST:
        raise DataError(
            f"the tokenizer in {folder} has {size / 2**20:,.0f} MiB of files, and at most {_LARGEST >> 20} MiB are "
            "allowed; remove files that do not belong to it"
        )
    return {name: read_input(files[name], most=_LARGEST) for name in sorted(files)}


@contextmanager
def private_copy(folder: Path) -> Iterator[Path]:
    """Yield a copy of a tokenizer's files, which no other user can change while transformers reads them.

    The copy has the folder's name, and no file with code. Raises DataError for files that are not JSON objects, and for
    settings that name other files.
    """
    with TemporaryDirectory(prefix="trainshed-") as home:
        copy = Path(home, folder.name or "tokenizer")
        copy.mkdir()
        for name, content in tokenizer_files(folder).items():
            if name in _OBJECTS:
                found = _read_object(folder / name, content)
                _check_settings(found if name == "tokenizer_config.json" else {}, folder)
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_bytes(content)
        yield copy


def _read_object(file: Path, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise DataError(f"{file} cannot be read: {error}; save the tokenizer again with transformers") from error
    except RecursionError as error:
        raise DataError(f"{file} is nested too deeply to be read; save the tokenizer again") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a JSON {type(found).__name__}, not an object; save the tokenizer again")
    return found


def _check_settings(config: dict[str, Any], folder: Path) -> None:
    strange = sorted(_PATHS & config.keys())
    files = config.get("fast_tokenizer_files", [])
    if not isinstance(files, list) or not all(isinstance(name, str) and Path(name).name == name for name in files):
        strange.append("fast_tokenizer_files")
    if strange:
        raise DataError(
            f"tokenizer_config.json in {folder} sets {strange[0]}, which can name files outside the folder; save the "
            "tokenizer again with transformers"
        )
