"""Log lines extracted from the output of Ray."""

import re

import pytest

from service.use_cases.runs.filters import AtLeast
from train_loop.telemetry.logs import plain

TIME = "2026-11-24 03:24:26,932"


@pytest.mark.parametrize(
    ("printed", "written"),
    [
        (f"{TIME} INFO train_loop.train: one\n", f"{TIME} INFO train_loop.train: one\n"),
        (
            f"\x1b[36m(RayTrainWorker pid=2)\x1b[0m {TIME} INFO train_loop.train: one\x1b[32m [repeated 3x]\x1b[0m\n",
            f"{TIME} INFO train_loop.train: one [repeated 3x] (RayTrainWorker pid=2)\n",
        ),
        (
            f"(pid=7, of a user) text\n(Map pid=7, ip=10.0.0.2) {TIME} WARNING a: b\n",
            f"(pid=7, of a user) text\n{TIME} WARNING a: b (Map pid=7, ip=10.0.0.2)\n",
        ),
        (
            f"{TIME}\tINFO streaming_executor.py:371 -- finished\n",
            f"{TIME} INFO ray.streaming_executor.py:371: finished\n",
        ),
        ("no line", "no line"),
    ],
)
def test_colours_and_ray_prefixes_are_removed(printed: str, written: str) -> None:
    assert plain(printed) == written


@pytest.mark.parametrize("prefix", ["", "(RayTrainWorker pid=2) ", "\x1b[36m(RayTrainWorker pid=2)\x1b[0m "])
def test_level_of_a_line_is_parsed_with_and_without_a_prefix(prefix: str) -> None:
    lines = [f"{prefix}{TIME} {level} a: b" for level in ("ERROR", "INFO", "WARNING")]
    keep = AtLeast("WARNING")
    assert [re.sub(".* ([A-Z]+) a: b", r"\1", line) for line in lines if keep(line)] == ["ERROR", "WARNING"]
