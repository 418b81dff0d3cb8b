"""Ends of generated rows: tokens, texts, and the tokens that end a row by default."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.builders.specs import infer_spec
from tests.support.ranks.peft_folders import write_parts
from tests.support.tokenizers.chats import BARE, CHATML, user, write_tokenizer
from train_loop.data.prepare.encode import TextRules, encode_rows
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError, ModelError
from train_loop.loop.infer.ends import Ends, stop_tokens_of
from train_loop.model.folder import tokenizer_folder
from train_loop.spec import InferJobSpec, parse_any


def test_row_ends_at_the_first_stop_token_or_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=None), needs_eos=False)
    ids, eos = tokenizer.encode_plainly(["one word\nmore"])[0], tokenizer.eos
    ends = Ends(frozenset({eos}), ("\nm", "absent"), tokenizer)
    size = ends.find(ids, 0)
    assert size is not None
    assert tokenizer.decode(ids[:size]) == "one word\nm"
    assert (ends.text(ids[:size]), ends.find(ids[: size - 1], 0)) == ("one word", None)
    assert ends.find([*ids[:3], eos, *ids], 0) == 4
    assert ends.text([*ids[:3], eos]) == "one"
    assert Ends(frozenset({5})).find([1, 5, 2, 5], 2) == 4, "tokens before start are not searched"
    assert Ends(frozenset({5})).text([1, 5]) is None


def test_text_of_half_a_character_ends_no_row(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=None), needs_eos=False)
    ids = tokenizer.encode_plainly(["é!"])[0]
    ends = Ends(frozenset(), ("é",), tokenizer)
    assert [ends.find(ids[:size], 0) for size in (1, 2, 3)] == [None, 2, 2]
    broken = Ends(frozenset(), ("\N{REPLACEMENT CHARACTER}",), tokenizer)
    assert broken.find(ids, 0) is None
    assert broken.find([ids[0], ids[2]], 0) == 2, "half a character that stays one is text"


@pytest.mark.parametrize(
    ("stop", "text", "left"),
    [("<|im_end|>", "Paris<|im_end|>is", "Paris"), ("s<|im_end|>\n", "Paris<|im_end|>\nis", "Pari")],
)
def test_stop_text_with_a_special_token_ends_the_row_there(tmp_path: Path, stop: str, text: str, left: str) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=None), needs_eos=False)
    ids = tokenizer.encode_plainly([text])[0]
    ends = Ends(frozenset(), (stop,), tokenizer)
    size = ends.find(ids, 0)
    assert tokenizer.decode(ids[:size], special=True) == text.removesuffix("is")
    assert ends.text(ids[:size]) == left
    assert Ends(frozenset(), (), tokenizer).text(ids) == text.replace("<|im_end|>", ""), "without special tokens"


def test_generated_text_keeps_the_space_of_its_first_word(tmp_path: Path) -> None:
    words = ["<unk>", "▁", *"abeinyprs", "▁a", "▁is", "▁any"]
    model = models.BPE({word: n for n, word in enumerate(words)}, [("▁", "a")], unk_token="<unk>")
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), needs_eos=False)
    answer = [words.index(word) for word in ("▁is", "▁any")]
    assert tokenizer.decode(answer) == "is any"
    assert Ends(frozenset(), (), tokenizer).text(answer) == " is any"
    assert Ends(frozenset(), (" is",), tokenizer).find(answer, 0) == 1
    assert Ends(frozenset(), (" any",), tokenizer).find(answer, 0) == 2


def test_default_stop_tokens_are_of_the_generation_config_then_the_tokenizer_then_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": [7, 8]}))
    model = parse_any(infer_spec(model={"path": str(tmp_path), "config": None})).model
    assert stop_tokens_of(model, None) == (7, 8)
    assert stop_tokens_of(model, 5) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert stop_tokens_of(model, 5) == (9,)
    named = model.model_copy(update={"tokenizer": "/other"})
    assert stop_tokens_of(named, 5) == (9, 5), "its model may have been trained with this tokenizer"
    assert stop_tokens_of(model.model_copy(update={"job": "job-a"}), 5) == (9, 5)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        stop_tokens_of(model, 5)


def adapters_job(folder: Path, **model: Any) -> InferJobSpec:
    """Return a job that generates from a base with EOS 1, and adapters with another tokenizer and template."""
    base, adapters = folder / "base", folder / "adapters"
    if not base.exists():
        write_tokenizer(base, template=BARE)
        (base / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        (base / "generation_config.json").write_text('{"eos_token_id": 1}')
        write_tokenizer(write_parts(adapters), template=CHATML, eos="<eos>")
    found = parse_any(
        infer_spec(
            model={"path": str(base), "config": None, "adapter": str(adapters)} | model,
            data={"columns": {"messages": "m"}},
            infer={"output": "generate"},
        )
    )
    assert isinstance(found, InferJobSpec)
    return found


@pytest.mark.parametrize("named", [False, True])
def test_adapters_answer_by_the_tokenizer_of_their_folder(tmp_path: Path, named: bool) -> None:
    job = adapters_job(tmp_path)
    if named:
        job = adapters_job(tmp_path, tokenizer=str(tmp_path / "adapters"))
    folder = tokenizer_folder(job.run)
    assert folder == tmp_path / "adapters"
    tokenizer = load_tokenizer(str(folder))
    turn = tokenizer.tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.eos != turn
    assert Ends.of(job, str(folder)).tokens == {1, tokenizer.eos, turn}, "the base's, theirs, and the template's"
    rules = TextRules.of_spec(job.run, folder)
    (found,) = encode_rows([Row(0, {"m": [user("Hi?")]})], job.data.columns, vocab=400, rules=rules)
    assert isinstance(found, Document)
    peer: Any = AutoTokenizer.from_pretrained(folder)
    assert found.input_ids.tolist() == peer.apply_chat_template([user("Hi?")], add_generation_prompt=True)["input_ids"]


def test_adapters_without_a_tokenizer_answer_by_that_of_the_base(tmp_path: Path) -> None:
    job = adapters_job(tmp_path)
    for file in (tmp_path / "adapters").iterdir():
        if not file.name.startswith("adapter_"):
            file.unlink()
    assert tokenizer_folder(job.run) == tmp_path / "base"
    (tmp_path / "adapters" / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(
        DataError, match=r"tokenizer\.json not found in .*adapters; set model\.tokenizer to a folder with"
    ):
        tokenizer_folder(job.run)
    other = adapters_job(tmp_path, tokenizer=str(tmp_path / "base"))
    assert tokenizer_folder(other.run) == tmp_path / "base", "a tokenizer that the spec names is used"
