"""Tokenizers with tokens that the model lacks: refused if any text needs them, otherwise each row is judged."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.support.builders.folders import write_tokenizer
from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, may_read, raw_spec
from tests.support.tokenizers.chats import assistant, user
from tests.support.tokenizers.random_folders import NAMES, write_random_tokenizer
from train_loop.data.prepare.cache import fingerprint, list_sources
from train_loop.data.prepare.encode import BadRow, Encoded, TextRules, encode_rows
from train_loop.data.prepare.rows import Row
from train_loop.data.text.tokenizer import load_tokenizer
from train_loop.errors import DataError
from train_loop.preflight.checks import answer
from train_loop.spec import ColumnsSpec, parse

ROWS = 300
"""Rows of the model's embeddings, and tokens of the tokenizer's base vocabulary."""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(folder: Path, *, template: str = PLAIN, **named: str) -> str:
    """Write a tokenizer whose last token, `<image>`, has the id 300, and name some of its special tokens."""
    write_tokenizer(folder, words=ROWS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    for name, token in named.items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def encode(folder: str, columns: dict[str, str], *cells: dict[str, Any], vocab: int = ROWS) -> list[Encoded]:
    rows = [Row(place, values) for place, values in enumerate(cells)]
    return encode_rows(rows, ColumnsSpec.model_validate(columns), vocab=vocab, rules=TextRules(folder))


@pytest.mark.parametrize(
    ("columns", "good", "bad"),
    [
        ({"text": "t"}, {"t": "an image"}, {"t": "an <image>"}),
        ({"prompt": "q", "response": "a"}, {"q": "so", "a": "x"}, {"q": "<image>", "a": "x"}),
        ({"messages": "m"}, {"m": [user("x"), assistant("y")]}, {"m": [user("<image>"), assistant("y")]}),
    ],
)
def test_only_a_row_with_a_token_that_the_model_lacks_is_bad(
    tmp_path: Path, columns: dict[str, str], good: dict[str, Any], bad: dict[str, Any]
) -> None:
    folder = write(tmp_path)
    load_tokenizer(folder).check_fits(ROWS)
    first, second = encode(folder, columns, good, bad)
    assert not isinstance(first, BadRow)
    assert second == BadRow(
        1, "it contains '<image>', which is token 300 and not in the model's vocabulary of 300 tokens"
    )
    assert not isinstance(encode(folder, columns, bad, vocab=ROWS + 1)[0], BadRow)


@pytest.mark.parametrize("name", ["eos_token", "bos_token", "pad_token"])
def test_special_token_that_the_model_lacks_is_rejected_by_name(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(write(tmp_path, **{name: "<image>"}))
    with pytest.raises(DataError, match=f"the tokenizer's {name} is '<image>' with token id 300, .* vocab_size to 301"):
        tokenizer.check_fits(ROWS)
    tokenizer.check_fits(ROWS + 1)


def test_base_vocabulary_that_the_model_lacks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="base vocabulary has token id 299, and the model has vocab_size=299; raise"):
        load_tokenizer(write(tmp_path)).check_fits(ROWS - 1)


def ask(tmp_path: Path, rows: list[dict[str, Any]], **data: Any) -> dict[str, Any]:
    """Return preflight's answer for rows below a folder, with the tokenizer in its folder `t`."""
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = {"config": TINY | {"vocab_size": ROWS}, "tokenizer": str(tmp_path / "t")}
    raw = raw_spec(data={"train": {"path": f"{tmp_path}/a.jsonl"}} | data, model=model)
    return answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})


def test_plan_warns_of_a_token_that_the_model_lacks_and_rejects_a_row_with_it(tmp_path: Path) -> None:
    write(tmp_path / "t")
    found = ask(tmp_path, [{"c": "x"}], columns={"text": "c"})
    assert found["problems"] == []
    (note,) = found["preview"][0]["notes"]
    assert note.startswith("the model has vocab_size=300, without the tokenizer's '<image>' (token 300); a row with")
    rows = [{"c": "x"}, {"c": "an <image>"}]
    (problem,) = ask(tmp_path, rows, columns={"text": "c"})["problems"]
    assert problem["pointer"] == "/data/train/path"
    assert "a.jsonl, line 2: it contains '<image>', which is token 300" in problem["message"]
    skipped = ask(tmp_path, rows, columns={"text": "c"}, on_bad_rows="skip")
    assert (skipped["problems"], skipped["preview"][0]["bad_rows"]) == ([], 1)


@pytest.mark.parametrize(
    ("template", "is_rejected"),
    [
        ("{% for m in messages %}<image>{{ m.content }}{% endfor %}", True),
        ("{% for m in messages %}{{ '<im' + 'age>' if m.role == 'system' }}{{ m.content }}{% endfor %}", True),
        (PLAIN + "{% if tools %}<image>{% endif %}", True),
        # Text never has such a part.
        (PLAIN + "{% for m in messages %}{% if m.content is not string %}<image>{% endif %}{% endfor %}", False),
    ],
)
@pytest.mark.parametrize("on_bad_rows", ["fail", "skip"])
def test_chat_template_that_writes_a_token_that_the_model_lacks_is_rejected(
    tmp_path: Path, template: str, on_bad_rows: str, *, is_rejected: bool
) -> None:
    write(tmp_path / "t", template=template)
    rows = [{"c": [user("x"), assistant("y")], "d": []}]
    problems = ask(tmp_path, rows, columns={"messages": "c", "tools": "d"}, on_bad_rows=on_bad_rows)["problems"]
    assert [problem["pointer"] for problem in problems] == (["/model/tokenizer"] if is_rejected else [])
    assert all("it contains '<image>', which is token 300" in problem["message"] for problem in problems)


def test_prepared_text_is_shared_between_vocabularies_unless_rows_may_be_bad(tmp_path: Path) -> None:
    folder = Path(write(tmp_path / "t"))
    (tmp_path / "a.txt").write_text("x")

    def name(vocab: int) -> str:
        config = {"config": TINY | {"vocab_size": vocab}, "tokenizer": str(folder)}
        spec = parse(raw_spec(model=config, data={"train": {"path": f"{tmp_path}/a.txt"}}))
        return fingerprint(spec, list_sources(spec)[0], folder)

    assert name(301) == name(999) != name(300)


@pytest.mark.parametrize("seed", range(seeds(20, more=1000)))
def test_no_document_of_a_random_tokenizer_has_a_token_that_the_model_lacks(tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "folder"
    write_random_tokenizer(folder, seed)
    logging.disable(logging.WARNING)
    try:
        tokenizer = load_tokenizer(str(folder))
    except DataError:
        return
    finally:
        logging.disable(logging.NOTSET)
    texts = ["a word", *NAMES, *(f"a{one}b" for one in tokenizer.added_tokens.values())]
    whole = tokenizer.encode(texts)
    for vocab in {tokenizer.vocab, tokenizer.vocab - 1, *(token + 1 for token in tokenizer.added_tokens)}:
        try:
            tokenizer.check_fits(vocab)
        except DataError:
            named = (tokenizer.eos, tokenizer.bos, tokenizer.pad, *tokenizer.prefix, *tokenizer.suffix)
            base = tokenizer.tokenizer.get_vocab(with_added_tokens=False).values()
            assert max(*base, *(token for token in named if token is not None)) >= vocab
            continue
        found = encode(str(folder), {"text": "t"}, *({"t": text} for text in texts), vocab=vocab)
        assert [isinstance(row, BadRow) for row in found] == [max(ids) >= vocab for ids in whole]
