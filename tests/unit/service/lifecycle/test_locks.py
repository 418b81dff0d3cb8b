"""Locks of the home and the SQLite database: one process at a time, and errors for unusable paths."""

from pathlib import Path

import pytest

from service.config.settings import Settings
from service.errors import DatabaseUnusable, HomeInUse, HomeUnusable
from service.lifecycle.locks import locked


def test_unwritable_home_or_database_raises_home_unusable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for settings in (
        Settings(home=file / "home"),
        Settings(home=file),
        Settings(home=tmp_path, database_url=f"sqlite:///{file}/shed.db"),
    ):
        with pytest.raises(HomeUnusable, match=rf"{file}.*; set TRAINSHED_HOME, and"), locked(settings):
            pass


def test_invalid_database_url_raises_database_unusable_without_password(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url="postgresql+psycopg://me:hush@db:port/shed")
    with pytest.raises(DatabaseUnusable) as raised, locked(settings):
        pass
    assert "TRAINSHED_DATABASE_URL is not the URL of" in str(raised.value)
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("link", ["file", "folder", "relative", "chain", "not there yet"])
def test_two_services_cannot_open_one_database_through_a_symbolic_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    folder, other = tmp_path / "data", tmp_path / "link"
    folder.mkdir()
    file = folder / "shed.db"
    if link != "not there yet":
        file.touch()
    if link == "folder":
        other.symlink_to(folder)
        url = f"sqlite:///{other}/shed.db"
    elif link == "chain":
        (tmp_path / "between").symlink_to(file)
        other.symlink_to(tmp_path / "between")
        url = f"sqlite:///{other}"
    elif link == "relative":
        monkeypatch.chdir(tmp_path)
        other.symlink_to("data/shed.db")
        url = "sqlite:///link"
    else:
        other.symlink_to(file)
        url = f"sqlite:///{other}"
    first = Settings(home=tmp_path / "one", database_url=f"sqlite:///{file}")
    second = Settings(home=tmp_path / "two", database_url=url)
    with (
        locked(first),
        pytest.raises(HomeInUse, match=rf"Another service uses the SQLite database {file}"),
        locked(second),
    ):
        pass
    with locked(second):
        pass


def test_database_with_a_hard_link_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "shed.db"
    file.touch()
    (tmp_path / "other.db").hardlink_to(file)
    settings = Settings(home=tmp_path / "home", database_url=f"sqlite:///{tmp_path / 'other.db'}")
    with pytest.raises(DatabaseUnusable, match=r"has 2 names \(hard links\)"), locked(settings):
        pass
