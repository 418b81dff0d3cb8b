"""Log lines of the programs that run in attempts."""

from pathlib import Path

import pytest

import train_loop

ROOT = Path(train_loop.__file__).parent
PROGRAMS = sorted(path for path in ROOT.rglob("*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_program_names_its_logger(path: Path) -> None:
    # `python -m` names the module __main__: its lines would lack time and level, or would be lost.
    assert "getLogger(__name__)" not in path.read_text()
