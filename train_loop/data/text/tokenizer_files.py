"""The files of a tokenizer folder, and a private copy of them for transformers to load."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from train_loop.data.text.tokenizer_settings import check_settings
from train_loop.errors import DataError
from train_loop.system.confine.landlock import run_restricted
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
_SETTINGS = {"tokenizer_config.json", "special_tokens_map.json"}
"""Files whose settings reach a tokenizer class. Of config.json, only the type of the model does."""
_OBJECTS = {*_SETTINGS, "added_tokens.json", "config.json"}


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


def load_with_transformers(folder: Path) -> Any:
    """Return a tokenizer as transformers loads it, without code from its folder, by a thread that reads only a copy.

    Raises DataError for files that are not JSON objects, and for settings that name other files; and the errors of
    transformers, which have no common class.
    """
    # Jobs on token ids, and their drivers, do not need it.
    from transformers import AutoTokenizer  # noqa: PLC0415 - it takes a second

    with TemporaryDirectory(prefix="trainshed-") as home:
        copy = _copy(folder, Path(home))
        return run_restricted(
            lambda: AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False),
            readable=[copy],
        )


def _copy(folder: Path, home: Path) -> Path:
    """Copy a tokenizer's files, so that no other user can change them while transformers reads them.

    The copy has the folder's name, no file with code, and no setting that names another file.
    """
    copy = home / (folder.name or "tokenizer")
    copy.mkdir()
    for name, content in tokenizer_files(folder).items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_bytes(_checked(folder / name, content) if name in _OBJECTS else content)
    return copy


def _checked(file: Path, content: bytes) -> bytes:
    found = _read_object(file, content)
    if file.name in _SETTINGS:
        found = check_settings(file, found)
    # Names of other versions of config.json, which may lead out of the folder.
    found.pop("configuration_files", None)
    return json.dumps(found).encode()


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
