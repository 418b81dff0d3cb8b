"""`python -m tools.plain_words`: counts phrases of private dialect in code and docs, and fails above LIMIT.

The phrases are riddles for a reader who is new here ("is told", "whoever", "goes on"). The limit may only be lowered.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMIT = 1.2
"""Maximum phrases per 1,000 words."""
PHRASES = (
    r"\b(is|are|was|were|be|been|being|gets?) told\b|\btells? (of|whether|that)\b",
    r"\b[Ww]ho(ever)? (was|is|has|had|asks|reads|waits|calls|follows|cannot|comes|wants|needs|may|sends|works)\b",
    r"\b[Ww]hat (is|was|are|were|comes|came|there|nobody|others|they|it|one|a|an|the|all|has|had|can|cannot|would)\b",
    r"\b(nobody|somebody)\b",
    r"\b[Oo]ne (that|which|who)\b|\bthose (that|who|which)\b",
    r"\bcom(e|es|ing) to\b|\bh(o|e)ld(s|ing)? (it |them )?against\b|\bin order\b(?! to| of| that)|\ball is well\b",
    r"\bof (its|their|his) own\b|\bby (itself|themselves)\b",
    r"\bas (it|they) (is|are|was|were)\b",
    r"\b(go|goes|going|went|gone) on\b|\btak(e|es|en|ing) up\b|\blet(s|ting)? go\b",
    r"\bany more\b|\bfor good\b",
    r"\b(is|are|was|were) no\b(?! (longer|more))",
    r"\b(anew|beside|mends?|mended|patience|patient|deeds?|wish(es|ed)?|whoever)\b",
    r"\bso (many|long|much)\b(?! as)",
    r"^[rf]?(\"\"\"|#\s)(What|Whether|How|Where|Who|Whose|Of)\b",
)
_FOUND = [re.compile(phrase) for phrase in PHRASES]


def main() -> int:
    """Print each phrase with its place if there are too many; return 1 then."""
    words, places = 0, list[str]()
    for file in _files():
        for line, text in _texts(file):
            words += len(text.split())
            places += [f"{file}:{line}: {found.group()!r}" for one in _FOUND for found in one.finditer(text)]
    rate = 1000 * len(places) / words
    if rate > LIMIT:
        print("\n".join(places))
        print(
            f"{rate:.2f} phrases per 1,000 words; at most {LIMIT}. Write what the code does in the field's own words."
        )
    return int(rate > LIMIT)


def _files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    left_out = ("benchmarks/results", "CHANGELOG", "tools/plain_words.py")
    return [Path(name) for name in listed if name.endswith((".py", ".md", ".yaml")) and not name.startswith(left_out)]


def _texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a document, and the comments and strings of a Python file, with their line numbers."""
    source = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


if __name__ == "__main__":
    sys.exit(main())
