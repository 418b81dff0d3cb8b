"""Rows of each shape, encoded as documents with EOS and a training mask; invalid rows give a reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.support.builders.folders import write_tokenizer
from tests.support.builders.specs import infer_spec
from tests.support.tokenizers.chats import write_surrounding
from train_loop.data.prepare.encode import BadRow, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.rows import Row
from train_loop.data.text.chat import load_chat_templates
from train_loop.data.text.tokenizer import load_tokenizer, train_tokenizer
from train_loop.errors import DataError
from train_loop.spec import ColumnsSpec, parse_any

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a byte tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return str(folder)


def encode(folder: str | None, columns: dict[str, str], *values: dict[str, Any], system: str | None = None) -> Any:
    rows = [Row(place, value) for place, value in enumerate(values)]
    return encode_rows(
        rows,
        ColumnsSpec.model_validate(columns),
        vocab=300,
        rules=None if folder is None else TextRules(folder, system),
    )


def texts(folder: str, document: Document) -> tuple[str, str]:
    """Return the text of each document and its trained part; EOS is written as $."""
    tokenizer = load_tokenizer(folder)

    def decode(ids: Any) -> str:
        names = [str(tokenizer.tokenizer.id_to_token(i)) for i in ids]
        return "".join({"<end>": "$", "Ġ": " ", "Ċ": "\n"}.get(name, name) for name in names)

    assert document.labels is not None
    kept = document.labels != -100
    assert np.array_equal(document.labels[kept], document.input_ids[kept])
    return decode(document.input_ids), decode(document.labels[kept])


def test_text_ends_with_eos_and_is_fully_trained(folder: str) -> None:
    first, empty = encode(folder, {"text": "t"}, {"t": "ab"}, {"t": ""})
    eos = load_tokenizer(folder).eos
    assert first.input_ids[-1] == eos
    assert len(first.input_ids) == 3
    assert first.labels is None
    assert empty.input_ids.tolist() == [eos]


def test_prompt_row_trains_only_its_response(folder: str) -> None:
    columns = {"prompt": "q", "response": "a"}
    found = encode(folder, columns, {"q": "Why? ", "a": "So."}, {"q": "", "a": "é"}, {"q": "x", "a": ""})
    assert [texts(folder, document)[1] for document in found][0::2] == ["So.$", "$"]
    assert texts(folder, found[0])[0] == "Why? So.$"
    assert (found[1].labels != -100).all()


def test_conversation_trains_only_the_assistant(folder: str) -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "no"},
    ]
    (document,) = encode(folder, {"messages": "m"}, {"m": talk}, system="Be short.")
    whole, trained = texts(folder, document)
    assert whole == "<|system|>Be short.\n<|user|>hi\n<|assistant|>yes\n<|user|>and?\n<|assistant|>no\n$"
    assert trained == "yesno$"


def test_tokens_keep_their_labels_and_weights() -> None:
    columns = {"input_ids": "i", "labels": "l", "weight": "w"}
    (document,) = encode(None, columns, {"i": np.array([5, 6]), "l": [-100, 6], "w": 0.5})
    assert document.input_ids.tolist() == [5, 6]
    assert document.labels.tolist() == [-100, 6]
    assert document.weight == 0.5


@pytest.mark.parametrize(
    ("columns", "values", "reason"),
    [
        ({"text": "t"}, {"t": None}, "column 't' holds null where text is needed"),
        ({"text": "t"}, {"t": 3}, "column 't' holds 3 where text is needed"),
        ({"prompt": "q", "response": "a"}, {"q": "x", "a": ["y"]}, "column 'a' holds a list where text"),
        ({"text": "t"}, {"t": "\ud800"}, "column 't' holds text that is not Unicode where text is needed"),
        ({"text": "t"}, {"t": b"\xff"}, "column 't' holds bytes that are not UTF-8 where text is needed"),
        ({"input_ids": "i"}, {"i": [1, "x"]}, "column 'i' holds text at position 1, where a whole number is needed"),
        (
            {"input_ids": "i"},
            {"i": np.array([1, 299, 2**40])},
            "column 'i' holds 1099511627776 at position 2, which is not in the model's vocabulary of 300 tokens",
        ),
        ({"input_ids": "i"}, {"i": [300]}, "column 'i' holds 300 at position 0, which is not in the model"),
        ({"input_ids": "i"}, {"i": [1, 2**70]}, f"column 'i' holds {2**70} at position 1, which is not in the model"),
        ({"input_ids": "i"}, {"i": [-100]}, "column 'i' holds -100 at position 0, which is not in the model"),
        ({"input_ids": "i", "labels": "l"}, {"i": [1, 2], "l": [-100, -1]}, "column 'l' holds -1 at position 1"),
        ({"messages": "m"}, {"m": [{"role": "assistant", "content": "\ud800"}]}, "surrogates not allowed"),
        ({"text": "t", "weight": "w"}, {"t": "a", "w": 1e300}, "where a weight of 0 or more is needed"),
        ({"input_ids": "i", "labels": "l"}, {"i": [1, 2], "l": [1]}, "2 tokens and 1 labels; they must be aligned"),
        (
            {"text": "t", "weight": "w"},
            {"t": "a", "w": -1},
            "column 'w' holds -1 where a weight of 0 or more is needed",
        ),
        ({"messages": "m"}, {"m": "hello"}, "messages"),
        ({"messages": "m", "tools": "x"}, {"x": "{"}, "tools must be a list or its JSON"),
        ({"messages": "m", "tools": "x"}, {"x": {"name": "f"}}, "tools must be a list of objects"),
    ],
)
def test_invalid_row_gives_a_reason_and_others_are_encoded(
    folder: str, columns: dict[str, str], values: dict[str, Any], reason: str
) -> None:
    good = {"t": "a", "w": 1, "q": "a", "a": "b", "i": [1], "l": [1], "m": [{"role": "assistant", "content": "x"}]}
    first, bad, last = encode(folder, columns, good, good | values, good)
    assert isinstance(bad, BadRow)
    assert bad.place == 1
    assert reason in bad.reason
    assert np.array_equal(first.input_ids, last.input_ids)


def test_unreadable_row_keeps_its_error(folder: str) -> None:
    (bad,) = encode_rows([Row(7, {}, "invalid JSON: x")], ColumnsSpec(text="t"), vocab=300, rules=TextRules(folder))
    assert bad == BadRow(7, "invalid JSON: x")


def test_vocabulary_too_small_for_bytes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocab_size=100 is too small for a byte-level tokenizer; choose more than 256"):
        train_tokenizer(iter(["x"]), vocab_size=100, folder=tmp_path)


TOOLS = [{"type": "function", "function": {"name": "sum"}}]
NO_TOOLS: list[Any] = [None, [], ""]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize("cell", [TOOLS, '[{"type": "function", "function": {"name": "sum"}}]'])
def test_tools_of_a_row_reach_the_template_untrained(tmp_path: Path, cell: Any) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    columns = {"messages": "m", "tools": "x"}
    with_tools, *without = encode(
        str(tmp_path),
        columns,
        {"m": TALK, "x": cell},
        *({"m": TALK, "x": nothing} for nothing in NO_TOOLS),
        {"m": TALK},
    )
    whole, trained = texts(str(tmp_path), with_tools)
    assert '"name": "sum"' in whole
    assert trained == "yes$"
    assert len({texts(str(tmp_path), document) for document in without}) == 1
    assert "sum" not in texts(str(tmp_path), without[0])[0]
    assert load_chat_templates(str(tmp_path)).use_tools


def test_conversation_without_an_assistant_turn_trains_nothing(folder: str) -> None:
    (document,) = encode(folder, {"messages": "m"}, {"m": TALK[:1]})
    assert set(document.labels.tolist()) == {-100}


def test_deeply_nested_tool_call_makes_its_row_bad(folder: str) -> None:
    nested: Any = "x"
    for _ in range(500):
        nested = {"a": nested}
    call = {"function": {"name": "f", "arguments": nested}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    rows = [Row(7, {"turns": turns})]
    (bad,) = encode_rows(rows, ColumnsSpec(messages="turns"), vocab=300, rules=TextRules(folder))
    assert bad == BadRow(7, "a value of the row is nested too deeply; write it with fewer levels")


def test_prompts_of_generation_lack_the_suffix_that_scored_texts_have(tmp_path: Path) -> None:
    folder = write_surrounding(tmp_path, "<s> $A </s>")
    raw: dict[str, Any] = {
        "data": {"train": {"path": "/a.jsonl"}, "columns": {"text": "t"}},
        "model": {"tokenizer": folder},
    }
    peer = AutoTokenizer.from_pretrained(folder)
    for output, ids in (("logprobs", peer("a <s>")["input_ids"]), ("generate", peer("a <s>")["input_ids"][:-1])):
        job = parse_any(infer_spec(**raw, infer={"output": output})).run
        rules = TextRules.of_spec(job, Path(folder))
        (found,) = encode_rows([Row(0, {"t": "a <s>"})], job.data.columns, vocab=300, rules=rules)
        assert isinstance(found, Document)
        assert found.input_ids.tolist() == ids
        cut, _ = Fit(2, "truncate", drops_untrained=False, bos=rules.kept[0], last=rules.kept[1])(found)
        assert cut.input_ids.tolist() == [ids[0], ids[-1] if output == "logprobs" else ids[1]]
