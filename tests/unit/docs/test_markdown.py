"""Markdown helpers of the generated pages."""

import pytest

from tools.docs.markdown import sentence, separate_blocks, table


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("text\n- one\n- two", "text\n\n- one\n- two"),
        ("text\n1. one\n   more\n2. two", "text\n\n1. one\n   more\n2. two"),
        ("text\n| a |\n| --- |", "text\n\n| a |\n| --- |"),
        ("# title\n- one", "# title\n- one"),
        ("```\ntext\n- one\n```", "```\ntext\n- one\n```"),
    ],
)
def test_block_after_a_paragraph_is_separated(page: str, expected: str) -> None:
    assert separate_blocks(page) == expected


def test_table_escapes_bars_and_line_breaks() -> None:
    assert table(("a", "b"), [("x | y", "one\ntwo")]) == "| a | b |\n| --- | --- |\n| x \\| y | one two |\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("higher starts first", "Higher starts first."),
        ("null: the default", "null: the default."),
        ("torch.compile of each unit", "torch.compile of each unit."),
        ("", ""),
    ],
)
def test_sentence_keeps_values_and_ends_with_a_full_stop(text: str, expected: str) -> None:
    assert sentence(text) == expected
