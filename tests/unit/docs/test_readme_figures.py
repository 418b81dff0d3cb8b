"""The README's figures: each row names the commit at which the table of its figures was measured."""

import re
from pathlib import Path

_ROW = re.compile(r"^\| (.+) \| \[(\w{8})\]\((benchmarks/results/[-\w]+\.md)\) \|$", re.MULTILINE)
ROWS = _ROW.findall(Path("README.md").read_text())


def test_commit_of_a_row_is_that_of_its_table() -> None:
    assert len(ROWS) == 8
    for row, commit, table in ROWS:
        assert f"commit {commit}" in Path(table).read_text(), f"{table} was measured again; renew the README: {row}"


def test_interval_of_a_row_is_in_its_table() -> None:
    for row, _, table in ROWS:
        for low, high in re.findall(r"\[(\d\.\d+), (\d\.\d+)\]", row):
            pairs = re.findall(r"\[(\d\.\d+), (\d\.\d+)\]", Path(table).read_text())
            places = len(low) - 2
            shown = [(f"{float(a):.{places}f}", f"{float(b):.{places}f}") for a, b in pairs]
            assert (low, high) in shown, f"{table} has no [{low}, {high}]: {row}"
