"""The fixtures that older versions wrote, unpacked at another path."""

import json
import sqlite3
import tarfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.fixtures.versions import make

VERSIONS = ("cc84111", "a9ef5af")
WITH_KINDS = ("cc84111", "678aac4")
"""Versions with a fixture of runs by kind of rows: tests/fixtures/versions/kinds.py."""
_TEXTS = (".json", ".jsonl", ".yaml")


@dataclass(frozen=True)
class OldVersion:
    """An unpacked fixture whose absolute paths name its new folder."""

    folder: Path

    @classmethod
    def unpack(cls, version: str, folder: Path) -> "OldVersion":
        """Unpack the archive of a version and change the paths, as an operator does who moves the home."""
        old = cls(folder)
        before = unpack(version, folder)["home"]
        move_database(old.home / "trainshed.db", before, str(old.home))
        return old

    @property
    def home(self) -> Path:
        """The home of the service."""
        return self.folder / "home"

    @property
    def backup(self) -> Path:
        """The output of `trainshed backup`."""
        return self.folder / "backup.tar"

    @property
    def stopped(self) -> Path:
        """The run directory that was stopped half way."""
        return self.home / "runs" / "default" / "stopped"

    @cached_property
    def made(self) -> dict[str, Any]:
        """The environment, the ids and the secrets of the fixture."""
        made: dict[str, Any] = self._read("made.json")
        return made

    @cached_property
    def answers(self) -> dict[str, Any]:
        """The answers of the old version, by path."""
        answers: dict[str, Any] = self._read("answers.json")
        return answers

    @cached_property
    def losses(self) -> list[dict[str, Any]]:
        """The metrics of the old version's uninterrupted run."""
        losses: list[dict[str, Any]] = self._read("losses.json")
        return losses

    def _read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


def unpack(name: str, folder: Path) -> dict[str, Any]:
    """Unpack an archive and change the paths of its home, also in its answers. Return how it was made."""
    with tarfile.open(Path(make.__file__).with_name(f"{name}.tar.gz")) as archive:
        archive.extractall(folder, filter="data")
    made: dict[str, Any] = json.loads((folder / "made.json").read_text())
    before, now = made["home"], str(folder / "home")
    for file in folder.rglob("*"):
        if file.suffix in _TEXTS and file.name != "made.json" and before in (text := file.read_text()):
            file.write_text(text.replace(before, now))
    return made


def move_database(file: Path, before: str, now: str) -> None:
    """Change the paths of the jobs in a database."""
    with sqlite3.connect(file) as connection:
        for column in ("run_dir", "spec"):
            connection.execute(f"UPDATE jobs SET {column} = replace({column}, ?, ?)", (before, now))
    connection.close()
