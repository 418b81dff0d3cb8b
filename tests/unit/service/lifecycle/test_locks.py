"""Locks of the home and the SQLite database: one process at a time, and errors for unusable paths."""

import os
import stat
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


@pytest.mark.parametrize(("mode", "after"), [(0o755, 0o700), (0o777, 0o700), (0o701, 0o700), (0o750, 0o750)])
def test_home_that_all_users_may_enter_is_made_private(
    tmp_path: Path, mode: int, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(mode)
    with locked(Settings(home=home)):
        assert stat.S_IMODE(home.stat().st_mode) == after
    assert ("home_made_private" in capsys.readouterr().out) == (mode != after)


@pytest.mark.parametrize("shared", ["temporary folder", "home of the user"])
def test_shared_folder_as_home_keeps_its_mode_with_a_warning(
    tmp_path: Path, shared: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mode = 0o1777 if shared == "temporary folder" else 0o755
    tmp_path.chmod(mode)
    monkeypatch.setenv("HOME", str(tmp_path) if shared == "home of the user" else "/nowhere")
    with locked(Settings(home=tmp_path)):
        assert stat.S_IMODE(tmp_path.stat().st_mode) == mode
    assert "home_open_to_others" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_home_of_another_user_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.chown(tmp_path, 65534, 65534)
    with locked(Settings(home=tmp_path)):
        pass
    assert "home_open_to_others" in capsys.readouterr().out


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
