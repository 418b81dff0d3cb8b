"""Links of all Markdown files lead to files and headings of the repository. `make docs` checks the site."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[3]
LINK = re.compile(
    r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|^\[[^\]]+\]: (\S+)|<(?:a|img)\b[^>]*\b(?:href|src)=\"([^\"]+)\"",
    re.MULTILINE,
)
CODE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


@cache
def tracked() -> frozenset[Path]:
    """Return the files and folders of the repository; in a copy without .git, all that lie on the disk."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    here = [ROOT / name for name in found.stdout.splitlines()] if found.returncode == 0 else list(ROOT.rglob("*"))
    files = {file for file in here if file.exists() and not {".venv", "build"} & set(file.relative_to(ROOT).parts)}
    return frozenset(files | {folder for file in files for folder in file.parents})


PAGES = sorted(file for file in tracked() if file.suffix == ".md")


def links(text: str) -> list[str]:
    """Return the relative links of a page, without those in code."""
    found = ("".join(groups) for groups in LINK.findall(CODE.sub("", text)))
    return [unquote(one) for one in found if "://" not in one and not one.startswith("mailto:")]


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them, and its own ones."""
    text, seen = page.read_text(), dict[str, int]()
    for line in re.findall(
        r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)|\{[^}]*\}$", r"\1", line).strip()
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        seen[slug] = seen.get(slug, -1) + 1
        if seen[slug]:
            seen[f"{slug}-{seen[slug]}"] = 0
    return {*seen, *re.findall(r"\bid=\"([^\"]+)\"|\{[^}]*#([\w-]+)", text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in links(page.read_text()):
        name, _, anchor = link.partition("#")
        target = (
            Path(ROOT, name.lstrip("/")) if name.startswith("/") else (page.parent / name).resolve() if name else page
        )
        if target not in tracked() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_links_are_found() -> None:
    text = (
        '[a](b.md#c "title") <img src="d.png"> [e](https://host)\n[f]: g.md\n```\n[h](i.md)\n```\n`[j](k)` [l](<m.md>)'
    )
    assert links(text) == ["b.md#c", "d.png", "g.md", "m.md"]


@pytest.mark.parametrize(
    "index", [page for page in PAGES if page.match("docs/*/index.md")], ids=lambda one: one.parent.name
)
def test_index_of_a_folder_links_all_its_pages(index: Path) -> None:
    beside = {page.name for page in PAGES if page.parent == index.parent} - {index.name}
    assert beside - {link.partition("#")[0] for link in links(index.read_text())} == set()
