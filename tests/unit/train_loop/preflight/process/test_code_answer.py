"""Answers of a process that runs users' code, which may have written them."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from train_loop.plan import ModelShape
from train_loop.preflight.code_answer import answer_with_code
from train_loop.preflight.process.child import Ended

BEFORE: dict[str, Any] = {"problems": [], "code": "5" * 64, "lora": None, "notes": []}
SHAPE = asdict(ModelShape.of_code())
HONEST = {"problems": [], "shape": SHAPE, "count": {"samples": 9, "exact": True}}

COUNT = b'{"problems": [], "shape": null, "count": {"samples": 1%s, "exact": true}}'


def answered(found: object, *, subject: str = "/code/model") -> dict[str, Any]:
    content = found if isinstance(found, bytes) else json.dumps(found).encode()
    return answer_with_code(BEFORE, Ended(content, subject, None, is_late=False, ending="exit code 0"))


def message(found: object) -> str:
    (problem,) = answered(found)["problems"]
    assert problem["pointer"] == "/code/model"
    return str(problem["message"])


def test_honest_answer_is_added_to_what_was_found_before() -> None:
    assert answered(HONEST) == {**BEFORE, **HONEST}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (b"", "was ended by the code (exit code 0); correct the code"),
        (b"x", "has no valid answer: it Expecting value: line 1 column 1 (char 0); correct the code"),
        (b"[" * 9000, "has no valid answer"),
        ({"failed": "KeyboardInterrupt: \x1b[0m"}, r"failed with KeyboardInterrupt: \x1b[0m; correct the code"),
        ({"unavailable": {"root": "file:///runs"}}, "found that storage does not answer; submit the job again"),
        ({"unavailable": "x"}, "found that storage does not answer; submit the job again"),
        ({"hello": 1}, "it is no JSON of the expected form"),
        ({**HONEST, "problems": [{"pointer": "/code\n", "message": ""}]}, "it has problems of unknown fields"),
        ({**HONEST, "problems": [{"pointer": "/code", "message": ""}] * 101}, "it has problems of unknown fields"),
        ({**HONEST, "problems": [{"pointer": "/code", "message": "x" * 200_000}]}, "it has a text of more than 131072"),
        ({**HONEST, "problems": [0] * 300_000}, "it has more than 200000 values"),
        ({**HONEST, "shape": {**SHAPE, "layers": 9}}, "it has sizes of a decoder"),
        ({**HONEST, "count": {"samples": -1, "exact": True}}, "it has a number that is not between 0 and"),
        ({**HONEST, "count": {"samples": float("nan"), "exact": True}}, "it has a number that is not between 0 and"),
        (COUNT % (b"0" * 4000), "it has a number that is not between 0 and"),
        (COUNT % (b"0" * 5000), "has no valid answer"),
    ],
)
def test_bad_answer_is_a_problem_of_the_code(found: object, reason: str) -> None:
    assert reason in message(found)


def test_answer_changes_nothing_that_was_found_before() -> None:
    before = BEFORE | {"problems": [{"pointer": "/data/train", "message": "no rows"}]}
    ended = Ended(json.dumps(HONEST).encode(), "/code", None, is_late=False, ending="exit code 0")
    found = answer_with_code(before, ended)
    assert (found["problems"], found["code"], found["count"]) == (before["problems"], "5" * 64, None)
    forged = {**HONEST, "code": "6" * 64, "notes": ["x"]}
    assert answered(forged)["code"] == "5" * 64
    assert answered(forged)["notes"] == []


def test_tree_of_a_model_keeps_its_lines() -> None:
    shape = {**SHAPE, "built": {"units": [], "tree": "Model(\n  Linear\n)"}, "loss_depends_on_micro_batch": True}
    assert answered({**HONEST, "shape": shape})["shape"]["built"]["tree"] == "Model(\n  Linear\n)"


def test_texts_of_an_answer_are_printable() -> None:
    problem = {"pointer": "/code", "message": "a\x1b[31m\u202eb"}
    assert answered({**HONEST, "problems": [problem]})["problems"][0]["message"] == r"a\x1b[31m\u202eb"


def test_pointer_of_an_unknown_form_becomes_code() -> None:
    (problem,) = answered(b"", subject="/code\x1b[31m")["problems"]
    assert problem["pointer"] == "/code"
