"""Tokenizer folders without tokenizer.json, with code, or with settings that name other files."""

import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer

from tests.support.tokenizers.chats import write_surrounding, write_tokenizer
from train_loop.data.dataset import IGNORE
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError


def test_vocabulary_and_merges_are_enough(tmp_path: Path) -> None:
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġw", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ w\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode([" w"]) == [[256, 257]]
    assert tokenizer.vocab == 258


@pytest.mark.parametrize(
    "name", ["BarthezTokenizer", "GPT2Tokenizer", "PegasusTokenizer", "Qwen2Tokenizer", "T5Tokenizer"]
)
def test_folder_without_the_vocabulary_of_its_class_is_refused(tmp_path: Path, name: str) -> None:
    # transformers makes tokenizers of such folders that write all words as the unknown token, or not at all.
    (tmp_path / "other.tiktoken").write_text("YQ== 0\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_neox"}')
    config = {"tokenizer_class": name, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"has only special tokens, so all text would be lost|cannot be read"):
        load_tokenizer(str(tmp_path))


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('this code has run')")
    with pytest.raises(DataError, match="it needs code from its folder, which is not run; save it as a fast tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["vocab", "merges", "init_inputs", "gguf_file", "fast_tokenizer_files"])
def test_setting_that_can_name_other_files_is_rejected(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    write_tokenizer(folder, template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {name: ["../secret/tokenizer.json"]}))
    with pytest.raises(DataError, match=f"tokenizer_config.json in {folder} sets {name}, which can name files outside"):
        load_tokenizer(str(folder))


def test_panic_of_the_tokenizer_is_a_fault_of_its_files(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, template=None)
    file = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    # The library panics when the expression takes too many steps. A panic is no Exception.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?:(?=a+)a+)+b"), "isolated")
    tokenizer.save(file)
    with pytest.raises(DataError, match=r"the tokenizer rejects text: .*retry-limit-in-match over; correct its files"):
        load_tokenizer(folder).encode(["a" * 400])


@pytest.mark.parametrize("end", ["", "</s>"])
def test_text_that_begins_with_bos_gets_no_second_one(tmp_path: Path, end: str) -> None:
    folder = write_surrounding(tmp_path, f"<s> $A {end}".strip())
    tokenizer, peer = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    plain, after = peer("<s>hi", add_special_tokens=False)["input_ids"], list(tokenizer.suffix)
    assert plain[0] == peer.bos_token_id
    assert tokenizer.encode(["<s>hi", "hi"]) == [[*plain, peer.eos_token_id]] * 2
    assert tokenizer.encode_plainly(["<s>hi", "hi"]) == [[*plain, *after]] * 2
    assert tokenizer.encode(["<s>hi</s>"]) == [[*plain, peer.eos_token_id]]
    (ids, labels), (other, same) = tokenizer.encode_responses([("<s>h", "i"), ("h", "i")])
    assert (
        (ids, labels) == (other, same) == ([*plain, peer.eos_token_id], [IGNORE, IGNORE, *plain[2:], peer.eos_token_id])
    )
    for rule, count in ((True, 1), (False, 1)):
        assert tokenizer.adding_bos(rule).encode(["<s>hi"])[0].count(peer.bos_token_id) == count


def test_text_that_begins_with_all_special_tokens_gets_no_second_ones(tmp_path: Path) -> None:
    # As text of GLM's chat template, whose tokenizer writes two tokens and names no BOS.
    tokenizer = load_tokenizer(write_surrounding(tmp_path, "[INST] <bos> $A", bos=None))
    assert tokenizer.encode(["[INST]<bos>hi"]) == tokenizer.encode(["hi"])
    assert tokenizer.begins("[INST]<bos>hi")
    assert len(tokenizer.encode(["[INST]hi"])[0]) == 1 + len(tokenizer.encode(["hi"])[0])
    assert not tokenizer.begins("[INST]hi")


def test_text_that_ends_with_eos_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=None))
    eos = tokenizer.tokenizer.id_to_token(tokenizer.eos)
    assert tokenizer.encode([f"a{eos}", f"a{eos}\n"]) == [
        tokenizer.encode(["a"])[0],
        tokenizer.encode([f"a{eos}\n"])[0],
    ]
    assert tokenizer.encode([f"a{eos}\n"])[0].count(tokenizer.eos) == 2
    (ids, labels), (other, untrained) = tokenizer.encode_responses([("a", f"b{eos}"), (f"a{eos}", "")])
    assert ids == tokenizer.encode(["ab"])[0]
    assert labels[-1] == untrained[-1] == tokenizer.eos
    # EOS of the prompt does not end the response.
    assert other == [*ids[:1], tokenizer.eos, tokenizer.eos]
