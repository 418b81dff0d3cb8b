"""Special tokens in exported configs equal those of transformers' Trainer; generation configs keep their fields."""

import json
import logging
import os
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.trainer_utils import align_special_tokens

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, may_read, spec
from tests.support.tokenizers.random_folders import write_random_tokenizer
from train_loop.checkpoint.export.text_files import (
    copy_text_files,
    name_class,
    read_tokenizer,
    special_tokens,
    write_template,
)
from train_loop.data.text.answer_ends import ends_of_answers
from train_loop.errors import DataError
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.published import align, end_also_at, generation_config
from train_loop.model.families.family import SpecialTokens
from train_loop.spec import JobSpec, ModelSpec
from train_loop.system.input_files import limit_inputs

NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def draw_id(draw: random.Random, *, several: bool) -> Any:
    one, other = draw.sample(range(5), 2)
    return draw.choice([None, one, [one, other], [one]] if several else [None, one])


@pytest.mark.parametrize("seed", range(100))
def test_special_tokens_are_aligned_as_by_transformers(seed: int) -> None:
    draw = random.Random(seed)
    own, generated = ({name: draw_id(draw, several=name == NAMES[0]) for name in NAMES} for _ in range(2))
    tokens = SpecialTokens(*(draw_id(draw, several=False) for _ in NAMES))
    config, generation = AutoConfig.for_model(**TINY | own), dict(generated)
    align(config, generation, tokens)
    theirs = SimpleNamespace(
        config=AutoConfig.for_model(**TINY | own), generation_config=GenerationConfig.from_dict(generated)
    )
    align_special_tokens(theirs, SimpleNamespace(**dict(zip(NAMES, tokens, strict=True))))
    assert {name: getattr(config, name) for name in NAMES} == {name: getattr(theirs.config, name) for name in NAMES}
    expected = {name: getattr(theirs.generation_config, name) for name in NAMES}
    assert {name: generation[name] for name in NAMES} == expected


def test_list_of_eos_tokens_is_kept() -> None:
    config, generation = AutoConfig.for_model(**TINY, eos_token_id=[0, 312]), {"eos_token_id": [0, 312]}
    align(config, generation, SpecialTokens(312, None, None))
    assert (config.eos_token_id, generation["eos_token_id"]) == ([0, 312], [0, 312])
    align(config, generation, SpecialTokens(7, None, None))
    assert (config.eos_token_id, generation["eos_token_id"]) == ([7, 0, 312], [7, 0, 312])


def test_generation_config_of_the_folder_keeps_all_fields_and_else_follows_from_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", eos_token_id=[0, 312])
    (folder / "generation_config.json").unlink()
    model = build_model(ModelSpec.model_validate({"path": str(folder)}))
    assert generation_config(model, folder)["eos_token_id"] == [0, 312]
    # transformers refuses to save a temperature without sampling, but folders have it.
    kept = {"temperature": 0.6, "do_sample": False, "eos_token_id": 5}
    (folder / "generation_config.json").write_text(json.dumps(kept))
    assert generation_config(model, folder) == kept


def test_tokenizer_that_cannot_be_loaded_ends_only_an_export_that_needs_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    loaded: Any = read_tokenizer(tmp_path, required=True)
    assert special_tokens(loaded, 257) == (256, None, None)
    # A model with such an id in its config cannot be loaded.
    assert special_tokens(loaded, 256) == (None, None, None)
    (tmp_path / "tokenizer.json").write_text("{")
    for folder in (tmp_path, tmp_path / "gone"):
        assert read_tokenizer(folder, required=False) is None
        with pytest.raises((DataError, FileNotFoundError)):
            read_tokenizer(folder, required=True)


TEXTS = ["a word", " two  words\n", "x<|im_end|>y </s>", "<think>so</think> é", "<s>hi<eos>"]
PROPERTIES = ("chat_template", "padding_side", "model_max_length", *NAMES)


@pytest.mark.parametrize("seed", range(seeds(20, more=1000)))
def test_exported_tokenizer_equals_that_of_the_run(tmp_path: Path, seed: int) -> None:
    """transformers chooses a tokenizer's class also by config.json, which in an export is that of the model."""
    home, model, folder = (tmp_path / name for name in ("home", "model", "export"))
    write_random_tokenizer(home, seed)
    write_random_tokenizer(model, seed + 1)  # the model's own tokenizer, which the run does not use
    folder.mkdir()
    logging.disable(logging.WARNING)
    try:
        own: Any = AutoTokenizer.from_pretrained(home)
        expected = [own(text)["input_ids"] for text in TEXTS]
    except Exception:  # transformers refuses the folder
        return
    finally:
        logging.disable(logging.NOTSET)
    copy_text_files(home, model, folder)
    name_class(folder, own)
    for family in ("qwen3", "llama", "gpt2"):
        AutoConfig.for_model(family).save_pretrained(folder)
        exported: Any = AutoTokenizer.from_pretrained(folder)
        assert [exported(text)["input_ids"] for text in TEXTS] == expected
        assert [getattr(exported, name) for name in PROPERTIES] == [getattr(own, name) for name in PROPERTIES]


def test_odd_entries_of_folders_do_not_end_an_export(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "export"
    write_tokenizer(home)
    folder.mkdir()
    for name in ("vocab.d", "tokenizer_old", "additional_chat_templates/x.jinja", "processor_config.json"):
        (home / name).mkdir(parents=True)
    (home / "additional_chat_templates/rag.jinja").write_text("r")
    os.mkfifo(home / "vocab.pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home / "vocab.socket"))
    (home / "vocab.gone").symlink_to("nowhere")
    (home / "vocab.loop").symlink_to("vocab.loop")
    (home / "preprocessor_config.json").symlink_to(home / "tokenizer_config.json")
    copy_text_files(home, None, folder)
    copied = {"tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"}
    copied |= {"additional_chat_templates/rag.jinja"}
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == copied


TEMPLATES = {name: f"{{{{ messages }}}}{name}" for name in ("default", "tool_use", "rag", "../odd")}
OWN = "{{ messages }}own"


def chats(**data: Any) -> JobSpec:
    return spec(data={"columns": {"messages": "m"}} | data, model={"tokenizer": "file:///tokenizer"})


def write_templates(home: Path, form: str) -> None:
    """Give a tokenizer its templates: as a list in its config, or as files."""
    write_tokenizer(home)
    config = json.loads((home / "tokenizer_config.json").read_text())
    if form == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
        (home / "tokenizer_config.json").write_text(json.dumps(config))
        return
    (home / "chat_template.jinja").write_text(TEMPLATES["default"])
    (home / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (home / f"additional_chat_templates/{name}.jinja").write_text(TEMPLATES[name])


@pytest.mark.parametrize("form", ["list", "files"])
@pytest.mark.parametrize("chosen", ["default", "tool_use", "rag", "a file"])
def test_chosen_template_is_the_default_of_an_export(tmp_path: Path, form: str, chosen: str) -> None:
    home, folder = tmp_path / "home", tmp_path / "export"
    write_templates(home, form)
    folder.mkdir()
    (tmp_path / "own.jinja").write_text(f"\ufeff{OWN}")
    (home / "chat_template.json").write_text('{"chat_template": "of the processor"}')
    named = (tmp_path / "own.jinja").as_uri() if chosen == "a file" else chosen
    copy_text_files(home, None, folder)
    own: Any = read_tokenizer(home, required=True)
    write_template(chats(chat_template=named), own, folder)
    name_class(folder, own)
    exported: Any = AutoTokenizer.from_pretrained(folder)
    for tools in (None, [{"name": "f"}]):
        assert exported.get_chat_template(tools=tools) == TEMPLATES.get(chosen, OWN)
    assert exported.chat_template == {"default": TEMPLATES.get(chosen, OWN)} | (
        {} if chosen == "rag" else {"rag": TEMPLATES["rag"]}
    ) or (chosen == "rag" and exported.chat_template == TEMPLATES["rag"])
    assert not (folder / "chat_template.json").exists()


def test_without_a_choice_all_templates_are_exported(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "export"
    write_templates(home, "files")
    folder.mkdir()
    copy_text_files(home, None, folder)
    own: Any = read_tokenizer(home, required=True)
    write_template(chats(), own, folder)
    name_class(folder, own)
    exported: Any = AutoTokenizer.from_pretrained(folder)
    assert exported.chat_template == own.chat_template
    assert own.get_chat_template(tools=[{}]) == TEMPLATES["tool_use"]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        # ChatML, whose end of turn is not this tokenizer's EOS.
        ("{% for m in messages %}<extra 1>{{ m.role }}\n{{ m.content }}<extra 0>\n{% endfor %}", 257),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", 256),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_generation_of_a_chat_model_ends_where_its_answers_end(tmp_path: Path, template: str, end: int | None) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    loaded: Any = read_tokenizer(tmp_path, required=True)
    loaded.add_tokens(["<extra 0>", "<extra 1>"])
    loaded.save_pretrained(tmp_path)
    assert ends_of_answers(chats().data, str(tmp_path)) == ([] if end is None else [end])
    assert ends_of_answers(spec().data, str(tmp_path)) == []


def test_generation_ends_at_more_tokens() -> None:
    for before, after in (({}, [7]), ({"eos_token_id": 5}, [5, 7]), ({"eos_token_id": [7, 5]}, [7, 5])):
        generation: dict[str, Any] = dict(before)
        end_also_at(generation, [7])
        assert generation["eos_token_id"] == after
        end_also_at(generation, [])
        assert generation["eos_token_id"] == after


def test_link_out_of_the_storage_roots_is_not_exported(tmp_path: Path) -> None:
    home, folder = tmp_path / "root/home", tmp_path / "root/export"
    write_tokenizer(home)
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (home / "vocab.txt").symlink_to(tmp_path / "secret")
    with limit_inputs(may_read(f"file://{tmp_path}/root")), pytest.raises(DataError, match=r"vocab\.txt"):
        copy_text_files(home, None, folder)
