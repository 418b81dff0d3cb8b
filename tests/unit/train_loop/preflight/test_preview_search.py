"""The plan's judgement of rows that it has all seen equals that of the job, for random rows of every kind."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.builders.searches import seeds
from tests.support.builders.specs import may_read, raw_spec
from tests.support.tokenizers import chats
from train_loop.data.prepare.cache import list_sources
from train_loop.data.prepare.encode import TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.pipeline import _encode_task
from train_loop.data.prepare.rows import cut
from train_loop.errors import DataError
from train_loop.preflight.checks import answer
from train_loop.spec import parse

COLUMNS: list[dict[str, Any]] = [
    *({"text": "c"}, {"text": "c", "weight": "d"}, {"prompt": "c", "response": "d"}, {"messages": "c"}),
    *({"messages": "c", "tools": "d"}, {"input_ids": "c"}, {"input_ids": "c", "labels": "d"}),
    *({"chosen": "c", "rejected": "d"}, {"chosen": "c", "rejected": "d", "token_ids": True}),
    {"anchor": "c", "positive": "d"},
]
HEADS = {"chosen": "reward", "anchor": {"embedding": {"group": 1}}}
TALK = [chats.user("q"), chats.assistant("a")]
CELLS: list[Any] = [
    *("x", "", None, 1, 1.5, True, -1, 1e300, "\ud800", "12", "[{}]", "y" * 300, {}, {"a": 1}, [], [1], ["a"]),
    *(
        [1, 2, 383],
        [384],
        [-100, 1],
        [-1],
        [1, None],
        [[1]],
        TALK,
        TALK[:1],
        [chats.user("q"), chats.assistant("z" * 200)],
    ),
    *([chats.user("q"), chats.assistant("a", weight=0)], [chats.user("q"), {"role": "assistant"}]),
]


def ends_job(raw: dict[str, Any]) -> bool:
    """Return whether preparation of the data fails, or leaves no tokens."""
    spec = parse(raw)
    (source,) = list_sources(spec)
    rules = None if source.columns.tokenised else TextRules.of(spec.data, Path(str(spec.model.tokenizer)))
    tables = _encode_task(
        {"id": np.array([0])},
        [cut(source.files, 2**20)],
        source.columns,
        partial(encode_rows, columns=source.columns, vocab=384, rules=rules),
        spec.data.on_bad_rows == "skip",
        Fit.of(spec, source.columns, rules),
    )
    try:
        return not any(len(ids) for table in tables for ids in table["input_ids"].to_pylist())
    except DataError:
        return True


def test_plan_rejects_the_rows_that_end_the_job_and_no_others(tmp_path: Path) -> None:
    tokenizer = chats.write_tokenizer(tmp_path / "t", template=chats.CHATML, eos="<|im_end|>")
    file, rejected, tried = tmp_path / "a.jsonl", 0, seeds(12, more=2_000)
    for seed in range(tried):
        some = random.Random(seed)
        columns = some.choice(COLUMNS)
        names = some.choice([["c"], ["c", "d"], ["c", "d"]])
        rows = [{name: some.choice(CELLS) for name in names} for _ in range(some.randint(1, 3))]
        file.write_text("\n".join(map(json.dumps, rows)))
        data: dict[str, Any] = {
            "train": {"path": str(file)},
            "columns": columns,
            "on_bad_rows": some.choice(["fail", "skip", "skip"]),
        }
        rules, head = [None, "fail", "drop", "truncate", "truncate_left", "split"], HEADS.get(next(iter(columns)))
        data |= {"on_long_rows": some.choice(rules[: -1 if head else None])}
        data |= {"packing": False} if head else {}
        model = {} if "input_ids" in columns or "token_ids" in columns else {"tokenizer": tokenizer}
        raw = raw_spec(data=data, model=model | ({"head": head} if head else {}))
        found = answer({"spec": raw, "read_policy": may_read(f"file://{tmp_path}").model_dump(), "parent": None})
        assert bool(found["problems"]) == ends_job(raw), (seed, data, rows, found["problems"])
        rejected += bool(found["problems"])
    assert 0 < rejected < max(tried, 12)
