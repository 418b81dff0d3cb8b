"""Long and untrained rows: truncated, dropped and counted by the spec's rule."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders.specs import infer_spec, raw_spec, spec
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.fit import Fit, check_rows
from train_loop.data.prepare.packing import Document
from train_loop.data.prepare.sources import SourceFile
from train_loop.errors import DataError
from train_loop.spec import parse_any


def document(size: int, trained: list[bool] | None = None) -> Document:
    ids = np.arange(size, dtype=np.int32)
    return Document(ids, None if trained is None else np.where(trained, ids, IGNORE).astype(np.int32))


masks = st.lists(st.booleans(), max_size=12)


@given(trained=masks, length=st.integers(2, 8), drops=st.booleans())
@pytest.mark.parametrize("rule", ["split", "truncate", "truncate_left", "drop", "fail"])
def test_document_is_kept_cut_or_dropped_by_the_rule(rule: Any, trained: list[bool], length: int, drops: bool) -> None:
    size = len(trained)
    kept, fate = Fit(length, rule, drops)(document(size, trained))
    expected = {"truncate": range(min(size, length)), "truncate_left": range(max(size - length, 0), size)}
    part = expected.get(rule, range(size))
    if rule == "drop" and size > length:
        assert (fate, len(kept.input_ids)) == ("dropped", 0)
    elif drops and not any(trained[place] for place in part[1:]):
        assert (fate, len(kept.input_ids)) == ("untrained", 0)
    else:
        assert kept.input_ids.tolist() == list(part)
        assert kept.labels is not None
        assert kept.labels.tolist() == [place if trained[place] else IGNORE for place in part]
        assert fate == ("long" if size > length else "whole")
    assert Fit(length, rule, drops).refuses(document(size)) == (rule == "fail" and size > length)


def test_truncate_left_keeps_bos_if_the_document_begins_with_it() -> None:
    long = document(6, [False, True, False, True, True, True])
    kept, fate = Fit(3, "truncate_left", drops_untrained=True, bos=0)(long)
    assert (kept.input_ids.tolist(), fate) == ([0, 4, 5], "long")
    assert kept.labels is not None
    assert kept.labels.tolist() == [IGNORE, 4, 5]
    assert Fit(3, "truncate_left", drops_untrained=True, bos=9)(long)[0].input_ids.tolist() == [3, 4, 5]
    assert Fit(6, "truncate_left", drops_untrained=True, bos=0)(long)[0] is long


@pytest.mark.parametrize(
    ("columns", "rule", "drops"),
    [
        ({"text": "t"}, "split", False),
        ({"messages": "m"}, "drop", True),
        ({"prompt": "p", "response": "r"}, "drop", True),
        ({"input_ids": "i"}, "split", False),
        ({"input_ids": "i", "labels": "l"}, "split", False),
    ],
)
def test_long_rows_are_dropped_by_default_if_only_answers_are_trained(
    columns: dict[str, str], rule: str, drops: bool
) -> None:
    model = {"path": "/models/a", "config": None}
    job = spec(data={"columns": columns}, model=model)
    found = Fit.of(job, job.data.columns, None)
    assert (found.length, found.rule, found.drops_untrained) == (32, rule, drops)
    chosen = spec(data={"columns": columns, "on_long_rows": "truncate"}, model=model)
    assert Fit.of(chosen, chosen.data.columns, None).rule == "truncate"


REWARD: dict[str, Any] = {
    "model": {"head": "reward"},
    "data": {"columns": {"chosen": "c", "rejected": "r"}, "packing": False},
}
TALKS = {"columns": {"messages": "m"}}
PATH = {"path": "/models/a", "config": None}


@pytest.mark.parametrize(
    ("raw", "choices"),
    [
        (raw_spec(), "drop or truncate or truncate_left or split"),
        (raw_spec(**REWARD), "drop or truncate or truncate_left"),
        (infer_spec(), "truncate or truncate_left"),
        (infer_spec(infer={"output": "generate"}), "truncate or truncate_left"),
        (infer_spec(model=PATH, infer={"output": "generate"}, data=TALKS), "truncate_left"),
        (infer_spec(model=PATH, data=TALKS), "truncate or truncate_left"),
    ],
)
def test_long_row_is_refused_with_the_rules_that_its_job_takes(raw: dict[str, Any], choices: str) -> None:
    raw["data"]["on_long_rows"] = "fail"
    job = parse_any(raw).run
    fit = Fit.of(job, job.data.columns, None)
    row, place = Document(np.zeros(40, np.int32)), (SourceFile("/a.parquet", 1, "", "parquet", None), 1)
    with pytest.raises(DataError, match=rf"on_long_rows is fail; raise sequence_length, or choose {choices}$"):
        check_rows([row], [place], fit, skip=False)
    for choice in choices.split(" or "):
        raw["data"]["on_long_rows"] = choice
        parse_any(raw)
