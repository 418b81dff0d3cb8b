"""Installs extras of the project at the versions of constraints.txt, and shows what pip downloads.

`make` runs it with the Python of `.venv`, which has only pip at first: this module needs no other package.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off")
_FILE = re.compile(r"\s*(Downloading|Using cached) (\S+?)-(\d\S*?)(?:-\S+\.whl|\.tar\.gz) \(([\d.]+) (bytes|[kMG]B)\)")
_UNITS = {"bytes": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
_LARGE = 50.0
"""Size from which a file gets its own line, in MB."""


def main(extras: str, index: str) -> int:
    """Install extras, with PyTorch from an extra package index if there is one. Return the exit code of pip."""
    began = time.monotonic()
    more = ["--extra-index-url", index] if index else []
    command = [*_PIP, *more, "--constraint", "constraints.txt", "--editable", f".[{extras}]"]
    default = "PyTorch's default build, on Linux for CUDA (TORCH_INDEX=URL takes another)"
    _show(f"installing {extras.replace(',', ', ')} with {f'PyTorch from {index}' if index else default}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stdout is not None
        for line in progress(pip.stdout):
            _show(f"  {line}")
    if pip.returncode == 0:
        _show(f"  installed in {time.monotonic() - began:.0f} s")
    return pip.returncode


def progress(output: Iterable[str]) -> Iterator[str]:
    """Yield a line for each large file that pip gets, and one before it unpacks them all."""
    small, total = 0, 0.0
    for line in output:
        found = _FILE.match(line)
        if found:
            verb, name, version, size, unit = found.groups()
            megabytes = float(size) * _UNITS[unit]
            total += megabytes
            small += megabytes < _LARGE
            if megabytes >= _LARGE:
                yield f"{verb.lower()} {name} {version}: {megabytes:,.0f} MB"
        elif line.startswith("Installing collected packages: "):
            packages = line.count(",") + 1
            yield f"{small} smaller files, {total:,.0f} MB in all; unpacking {packages} packages"
        elif line.startswith("Would install "):
            yield line[0].lower() + line[1:].rstrip()


def _show(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], os.environ.get("TORCH_INDEX", "")))
