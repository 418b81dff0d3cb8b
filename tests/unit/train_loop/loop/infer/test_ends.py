"""Ends of generated rows: tokens, texts, and the tokens that end a row by default."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.support.builders.specs import infer_spec
from tests.support.tokenizers.chats import write_tokenizer
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import ModelError
from train_loop.loop.infer.ends import Ends, stop_tokens_of
from train_loop.spec import parse_any


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
    assert stop_tokens_of(model, 5, trained=True) == (9, 5)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is not valid JSON"):
        stop_tokens_of(model, 5)
