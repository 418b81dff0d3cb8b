"""Characters that control a terminal or hide text: rejected in names, escaped in shown text."""

import json
import re
import unicodedata

# C0, DEL and C1; soft hyphen; zero-width characters and bidi marks; line and paragraph separators, bidi embeddings;
# invisible operators and isolates; the byte-order mark and annotations; surrogates; tags.
_HIDDEN = (
    "\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_ANY = re.compile(f"[{_HIDDEN}]")
_BUT_LINES = re.compile(f"(?![\n\t])[{_HIDDEN}]")


def hidden_character(text: str) -> str | None:
    """Return the first invisible character of a name, as `U+202E (RIGHT-TO-LEFT OVERRIDE)`, or None."""
    found = _ANY.search(text)
    if found is None:
        return None
    name = unicodedata.name(found[0], "")
    return f"U+{ord(found[0]):04X}" + (f" ({name})" if name else "")


def refuse_hidden(text: str) -> str:
    """Return a name unchanged. Raises ValueError if it holds a control or invisible character."""
    if (hidden := hidden_character(text)) is not None:
        raise ValueError(f"control and invisible characters are not allowed, and it holds {hidden}; remove it")
    return text


def show(text: str, *, lines: bool = True) -> str:
    r"""Return text that cannot control a terminal: ESC becomes `\x1b`; `lines` keeps line ends and tabs."""
    return (_BUT_LINES if lines else _ANY).sub(_escape, text)


def show_json(text: str) -> str:
    """Return the same JSON document, with control and invisible characters in strings escaped as in JSON."""
    return _BUT_LINES.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
