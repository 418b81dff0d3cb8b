"""`python -m train_loop.data.prepare.check`: samples of an earlier version against today's rules."""

import json
import shutil
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from tests.support.builders.specs import spec
from tests.support.tokenizers.chats import CHATML, assistant, user, write_tokenizer
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.cache import join, list_sources
from train_loop.data.prepare.check import _beginnings, _is_in, _prepared, main
from train_loop.data.prepare.encode import TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document, pack
from train_loop.data.prepare.pointer import pin
from train_loop.data.prepare.rows import Row
from train_loop.data.shards import write_part
from train_loop.run_dir import RunDir

ROWS = [{"messages": [user(f"q{n}"), assistant(f"a{n}")]} for n in range(5)]


def write_run(folder: Path, *, end_token: bool, template: str = CHATML, then: str = CHATML) -> Path:
    """Write a run whose samples have trained end tokens, or lack them as in an earlier version.

    `then`: the template that wrote the samples.
    """
    tokenizer = write_tokenizer(folder / "tokenizer", template=template, eos="<|im_end|>")
    old = shutil.copytree(tokenizer, folder / "old")
    (old / "chat_template.jinja").write_text(then)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    data = {"train": {"path": str(folder / "rows.jsonl")}, "columns": {"messages": "messages"}, "sequence_length": 128}
    job = spec(data=data, model={"tokenizer": tokenizer})
    rules = TextRules.of(job.data, old)
    documents = []
    for one in encode_rows([Row(0, row) for row in ROWS], job.data.columns, vocab=384, rules=rules):
        assert isinstance(one, Document)
        assert one.labels is not None
        ends = one.labels == rules.load().eos
        documents.append(one if end_token else replace(one, labels=np.where(ends, IGNORE, one.labels)))
    (folder / "cache/old").mkdir(parents=True)
    part = write_part(pack(documents, 128), folder / "cache/old")
    run = RunDir.at(str(folder / "run"))
    run.write_spec(job)
    pin(join(job, [part], Path(tokenizer)), run.data)
    assert list_sources(job)
    return folder / "run"


@pytest.mark.parametrize("end_token", [True, False])
def test_run_of_an_earlier_version_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end_token: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", str(write_run(tmp_path, end_token=end_token))])
    assert main() == (0 if end_token else 1)
    out = capsys.readouterr().out
    if end_token:
        assert out.endswith("5 of the first rows have the tokens and labels of the run\n")
    else:
        assert "5 of 5 rows that were compared have other tokens or labels than in the run; the first is now " in out
        assert "⟦a0<|im_end|>⟧" in out


@pytest.mark.parametrize("run_dir", ["nowhere://bucket/run", "/nowhere/run"])
def test_unreadable_run_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run_dir: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["check", run_dir])
    assert main() == 2
    assert run_dir in capsys.readouterr().err


def test_long_rows_are_compared_by_their_first_part(tmp_path: Path) -> None:
    rows = [Document(np.arange(100, dtype=np.int32), None)]
    assert [len(one.input_ids) for one in _beginnings(rows, Fit(50, "split", drops_untrained=False))] == [50]
    (tmp_path / "old").mkdir()
    part = write_part(pack(rows, 50), tmp_path / "old")
    (first,) = _beginnings(rows, Fit(50, "split", drops_untrained=False))
    prepared = _prepared(part)
    assert _is_in(first, prepared)
    assert not _is_in(replace(first, input_ids=first.input_ids + 1), prepared)


@pytest.mark.parametrize("end_token", [True, False])
def test_template_that_writes_the_date_is_compared_as_on_the_day_of_preparation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end_token: bool
) -> None:
    day = date.today() - timedelta(days=9)
    now = "  {% if strftime_now is defined %}\n{{ strftime_now('%d %b %Y') }}{% endif %}\n" + CHATML
    then = f"{day:%d %b %Y}" + CHATML
    folder = write_run(tmp_path, end_token=end_token, template=now, then=then)
    monkeypatch.setattr(sys, "argv", ["check", str(folder)])
    monkeypatch.setattr("train_loop.data.prepare.check._MOST_DAYS", 20)
    assert main() == (0 if end_token else 1)
    out = capsys.readouterr().out
    same = f"5 of the first rows have the tokens and labels of the run, if the chat template writes the date of {day}"
    assert (same in out) is end_token
