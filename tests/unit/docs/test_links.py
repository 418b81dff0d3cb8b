"""Links of Markdown files outside the site; `make docs` checks those inside."""

import re
from pathlib import Path

import pytest

FILES = [*sorted(Path().glob("*.md")), Path("deploy/README.md"), Path("benchmarks/README.md")]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_relative_links_lead_to_files(file: Path) -> None:
    targets = [one for one in LINK.findall(file.read_text()) if "://" not in one]
    assert [one for one in targets if not (file.parent / one).exists()] == []
