"""Characters that control a terminal or hide text."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train_loop.spec import refuse_hidden, show, show_json

HIDDEN = list("\x1b\x00\x7f\x85\x9b\xad\u200b\u2028\u2029\u202e\u2066\ufeff")


@pytest.mark.parametrize("character", [*HIDDEN, "\n", "\t"], ids=ascii)
def test_name_with_a_hidden_character_is_rejected_with_its_code(character: str) -> None:
    with pytest.raises(ValueError, match=f"U\\+{ord(character):04X}"):
        refuse_hidden(f"a{character}b")


@pytest.mark.parametrize("name", ["", "team a", "größe", "名前", "🚀", "a\u00a0b"])
def test_visible_name_is_kept(name: str) -> None:
    assert refuse_hidden(name) == show(name) == name


@given(st.text())
def test_shown_text_contains_no_control_characters(text: str) -> None:
    for lines in (True, False):
        allowed = {"\n", "\t"} if lines else set[str]()
        categories = {unicodedata.category(one) for one in show(text, lines=lines) if one not in allowed}
        assert not categories & {"Cc", "Cs", "Zl", "Zp"}


@given(st.text(alphabet=st.one_of(st.sampled_from(HIDDEN), st.characters(exclude_categories=["Cs"]))))
def test_shown_json_parses_to_the_same_document(text: str) -> None:
    document = json.dumps({"a": text}, ensure_ascii=False, indent=2)
    shown = show_json(document)
    assert json.loads(shown) == {"a": text}
    assert show(shown) == shown
