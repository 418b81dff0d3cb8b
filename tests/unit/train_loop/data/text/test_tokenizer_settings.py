"""Settings of a tokenizer's JSON files: none makes transformers open a file outside of the folder."""

import json
import os
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.support.builders.searches import drawn
from tests.support.tokenizers.chats import write_tokenizer
from tests.support.tokenizers.classes import tokenizer_classes, tokenizer_settings
from train_loop.data.text import tokenizer_files
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.data.text.tokenizer_files import load_with_transformers
from train_loop.data.text.tokenizer_settings import check_settings
from train_loop.errors import DataError
from train_loop.system.confine.landlock import landlock_version

CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
SETTINGS = (*tokenizer_settings(), "sp_model_kwargs.model_file", "mecab_kwargs.mecab_option", "extra.vocab_file")
CLASSES = drawn([*tokenizer_classes()], 10)
MORE = "MORE" in os.environ
_opened = list[str]()
_records = False


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if _records and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.path.abspath(os.fsdecode(arguments[0])))


sys.addaudithook(_record)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Record the absolute paths of the files that Python opens in the body."""
    global _records
    _opened.clear()
    _records = True
    try:
        yield _opened
    finally:
        _records = False


@pytest.fixture
def beta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with files of another project under names that classes look for."""
    home = tmp_path / "beta"
    home.mkdir()
    for name in ("vocab.json", "merges.txt", "secret", "tokenizer.json", "config.json", "config.4.0.0.json"):
        (home / name).write_text("alice password")
    monkeypatch.chdir(home)
    return home


@pytest.fixture(params=[True, False], ids=["tokenizer.json", "vocab.json"])
def alpha(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder from which most classes load, with or without tokenizer.json."""
    folder = tmp_path / "alpha"
    write_tokenizer(folder, template=None)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = {**backend.get_vocab(with_added_tokens=False), "ab": 300, "<|endoftext|>": 301}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "vocab.txt").write_text("\n".join(["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *words]))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    if not request.param:
        (folder / "tokenizer.json").unlink()
    return folder


def write_settings(folder: Path, config: dict[str, Any], special: dict[str, Any]) -> None:
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / SPECIAL).write_text(json.dumps(special))


def settings_of(name: str, value: object) -> dict[str, Any]:
    """Return a setting, or one in an object for `a.b`."""
    outer, _, inner = name.partition(".")
    return {outer: {inner: value} if inner else value}


def refusal(file: Path, settings: dict[str, Any]) -> str | None:
    """Return the error of settings; None if they are allowed."""
    try:
        check_settings(file, settings)
    except DataError as error:
        return str(error)
    return None


def passing(file: Path, value: object) -> list[dict[str, Any]]:
    """Return the settings of all classes that may have a value. All others are refused by name."""
    found = []
    for name in SETTINGS:
        error = refusal(file, settings_of(name, value))
        if error is None:
            found.append(settings_of(name, value))
        else:
            assert f"{file.name} in {file.parent} sets {name}, which can name files outside the folder" in error
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", [CONFIG, SPECIAL])
def test_setting_of_any_tokenizer_class_opens_no_other_file(beta: Path, alpha: Path, file: str) -> None:
    others = {str(path) for path in beta.iterdir()}
    values: list[object] = [*others, *(f"../beta/{path.name}" for path in beta.iterdir()), "secret", "..", 3, [*others]]
    passed = [passing(alpha / file, value) for value in values]
    for number, name in enumerate(CLASSES):
        each, together = passed[number % len(values)], [dict(ChainMap(*one)) for one in passed]
        for settings in (
            [*each[number % 4 :: 4], *together] if MORE else [together[number % len(values)], *each[number::24]]
        ):
            write_settings(alpha, {"tokenizer_class": name} | settings if file == CONFIG else {}, settings)
            # Many classes need other files, or other values.
            with opened_files() as paths, suppress(Exception):
                load_with_transformers(alpha)
            assert paths
            assert not others & {*paths}, (name, settings)


ATTACKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tokenizer_class": "GemmaTokenizer", "vocab_file": "../alpha/vocab.json", "merges_file": "secret"}, {}),
    ({"tokenizer_class": "Siglip2Tokenizer", "vocab_file": "../alpha/vocab.json", "merges_file": "secret"}, {}),
    ({"tokenizer_class": "GPT2Tokenizer"}, {"merges_file": "secret"}),
    ({"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_file": "secret"}),
    ({"tokenizer_class": "BertTokenizer"}, {"vocab": "secret"}),
]
"""Settings with which version 5.23 of transformers reads a file of another project into the vocabulary or an error."""


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_error_of_a_tokenizer_shows_nothing_of_a_file_that_its_settings_name(
    beta: Path, alpha: Path, attack: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    write_settings(alpha, *attack)
    with pytest.raises(DataError, match=r"sets .*, which can name files outside the folder; save the"):
        load_tokenizer(str(alpha))


@pytest.mark.skipif(landlock_version() < 1, reason="the kernel has no Landlock")
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_thread_that_loads_a_tokenizer_reads_no_other_file(
    beta: Path, alpha: Path, attack: tuple[dict[str, Any], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_files, "check_settings", lambda file, settings: settings)
    write_settings(alpha, *attack)
    try:
        found = str(load_tokenizer(str(alpha), needs_eos=False).tokenizer.get_vocab())
    except DataError as error:
        found = str(error)
    assert "alice" not in found
    assert "password" not in found
    # Only the thread that loaded it is restricted.
    assert Path("secret").read_text() == "alice password"


def test_config_names_no_version_of_itself_outside_of_the_folder(beta: Path, alpha: Path) -> None:
    write_settings(alpha, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}, {})
    names = [f"../../../{beta}/config.4.0.0.json", f"{beta}/config.4.0.0.json"]
    (alpha / "config.json").write_text(json.dumps({"model_type": "gpt2", "configuration_files": names}))
    with opened_files() as paths:
        load_tokenizer(str(alpha))
    assert not {str(path) for path in beta.iterdir()} & {*paths}


TOKEN = {"content": "</think>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
PUBLISHED: dict[str, dict[str, Any]] = {
    "pythia": {
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "name_or_path": "EleutherAI/gpt-neox-20b",
        "special_tokens_map_file": "/admin/home/.cache/huggingface/hub/gpt-neox-20b/special_tokens_map.json",
        "tokenizer_class": "GPTNeoXTokenizer",
    },
    "minilm": {
        "do_lower_case": True,
        "tokenize_chinese_chars": True,
        "strip_accents": None,
        "tokenizer_file": "/root/.cache/huggingface/transformers/1f2e.json",
        "never_split": ["a/b"],
        "tokenizer_class": "BertTokenizer",
        "model_max_length": 512,
    },
    "bloom": {"special_tokens_map_file": None, "padding_side": "left", "tokenizer_class": "BloomTokenizerFast"},
    "qwen": {
        "add_bos_token": False,
        "added_tokens_decoder": {"400": {**TOKEN, "special": True}},
        "additional_special_tokens": ["</think>"],
        "bos_token": None,
        "chat_template": "{% for m in messages %}{{ m.content }}</think>\n{% endfor %}",
        "clean_up_tokenization_spaces": False,
        "eos_token": "</think>",
        "errors": "replace",
        "extra_special_tokens": {},
        "model_max_length": 131072,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
    },
    "llama": {
        "bos_token": {"__type": "AddedToken", **TOKEN, "content": "<s>"},
        "model_max_length": 1000000000000000019884624838656,
        "sp_model_kwargs": {},
        "legacy": False,
        "use_default_system_prompt": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "tokenizer_class": "LlamaTokenizer",
        "vocab_file": None,
    },
    "mbart": {
        "src_lang": "en_XX",
        "tgt_lang": None,
        "language_codes": "ML50",
        "num_madeup_words": 8,
        "sp_model_kwargs": {"nbest_size": -1, "alpha": 0.1},
        "tokenizer_class": "TokenizersBackend",
    },
    "version 5": {
        "backend": "tokenizers",
        "is_local": False,
        "local_files_only": False,
        "processor_class": "Gemma3Processor",
        "auto_map": {"AutoProcessor": "org/model--processing.Processor"},
        "model_specific_special_tokens": {"image_token": "<image>", "eoi_token": "</image>"},
        "response_schema": {
            "type": "object",
            "x-regex": "</think>(.*)",
            "properties": {"log_file": {"type": "string"}},
        },
        "fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.json"],
        "transformers_version": "5.0.0.dev0",
        "tokenizer_class": "TokenizersBackend",
    },
}
"""Settings as in published folders."""


def behaviour(tokenizer: PreTrainedTokenizerBase) -> tuple[object, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if isinstance(backend, Tokenizer) else tokenizer.get_vocab()
    return type(tokenizer), content, tokenizer.special_tokens_map, tokenizer.chat_template


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_folders_do_as_in_transformers(alpha: Path, name: str) -> None:
    write_settings(alpha, PUBLISHED[name], {"eos_token": TOKEN, "pad_token": "<|endoftext|>"})
    try:
        expected = AutoTokenizer.from_pretrained(alpha, local_files_only=True)
    except ValueError:
        pytest.skip("the class needs tokenizer.json")
    assert behaviour(load_with_transformers(alpha)) == behaviour(expected)


def test_folder_of_any_class_loads_as_in_transformers(alpha: Path) -> None:
    loaded = 0
    for name in CLASSES:
        write_settings(alpha, {"tokenizer_class": name}, {})
        try:
            expected = AutoTokenizer.from_pretrained(alpha, local_files_only=True)
            saved = alpha.parent / "saved" / name
            expected.save_pretrained(saved)
            found = AutoTokenizer.from_pretrained(saved, local_files_only=True)
        except Exception:  # the class needs other files or libraries
            continue
        assert behaviour(load_with_transformers(alpha)) == behaviour(expected), name
        assert behaviour(load_with_transformers(saved)) == behaviour(found), name
        loaded += 1
    assert loaded
