"""Generate the synchronous client, `trainshed/_sync`, from the asynchronous one, `trainshed/_async`.

`python -m tools.sync_client` writes the files; with `--check`, it exits with 1 if they are out of date.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).parents[1]
ASYNC, SYNC = ROOT / "trainshed" / "_async", ROOT / "trainshed" / "_sync"
_HEADER = "# Generated from trainshed/_async/{} by `make client`; do not edit.\n"
_NAMES = {
    "_async": "_sync",
    "asyncio": "time",
    "AsyncApi": "Api",
    "AsyncBaseTransport": "BaseTransport",
    "AsyncClient": "Client",
    "AsyncJob": "Job",
    "AsyncPeerCheck": "PeerCheck",
    "AsyncTransport": "Transport",
    "aclose": "close",
    "aclosing": "closing",
    "aiter_sse": "iter_sse",
    "aread": "read",
}
"""Replacements of names, besides those of unasync."""
_AWAITABLE = re.compile(r"\bAwaitable\[((?:[^][]|\[[^][]*\])*)\]")
_UNUSED_IMPORTS, _IMPORT_ORDER, _YIELD_FROM, _PARENTHESES = "F401", "I", "UP028", "UP034"


def generate() -> dict[Path, str]:
    """Return the text of each synchronous module, by its path."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "_async")
        shutil.copytree(ASYNC, sources, ignore=shutil.ignore_patterns("__pycache__"))
        rule = unasync.Rule(fromdir=f"{sources}/", todir=f"{folder}/_sync/", additional_replacements=_NAMES)
        files = sorted(sources.glob("*.py"))
        unasync.unasync_files([str(file) for file in files], [rule])
        return {SYNC / file.name: _finish(file.name, Path(folder, "_sync", file.name).read_text()) for file in files}


def _finish(name: str, text: str) -> str:
    """Add the header, and replace what unasync leaves: awaitables in annotations, and words of docstrings."""
    text = _AWAITABLE.sub(r"\1", text).replace("asynchronous", "synchronous")
    text = re.sub(r"`Async(\w+)", r"`\1", text)
    if name == "__init__.py":
        text = '"""The synchronous client."""\n'
    text = _HEADER.format(name) + "\n" + text
    rules = ",".join((_UNUSED_IMPORTS, _IMPORT_ORDER, _YIELD_FROM, _PARENTHESES))
    text = _ruff("check", "--fix", "--unsafe-fixes", "--quiet", "--select", rules, name=name, text=text)
    return _ruff("format", name=name, text=text)


def _ruff(*arguments: str, name: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(SYNC / name), "-"]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write the synchronous client, or check that it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is out of date")
    check = parser.parse_args().check
    wanted = generate()
    found = {path: path.read_text() for path in SYNC.glob("*.py")}
    stale = sorted(path for path in wanted.keys() | found.keys() if wanted.get(path) != found.get(path))
    if check and stale:
        sys.exit(f"out of date: {', '.join(path.name for path in stale)} in trainshed/_sync; run `make client`")
    if not check:
        SYNC.mkdir(exist_ok=True)
        for path in stale:
            path.write_text(wanted[path]) if path in wanted else path.unlink()


if __name__ == "__main__":
    main()
