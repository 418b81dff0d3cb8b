"""What one process at a time may have is refused in a line where it cannot be had at all."""

from pathlib import Path

import pytest

from service.errors import DatabaseUnusable, HomeUnusable
from service.locks import locked
from service.settings import Settings


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for settings in (
        Settings(home=file / "home"),
        Settings(home=file),
        Settings(home=tmp_path, database_url=f"sqlite:///{file}/shed.db"),
    ):
        with pytest.raises(HomeUnusable, match=rf"{file}.*; set TRAINSHED_HOME, and"), locked(settings):
            pass


def test_urls_that_name_no_database(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, database_url="postgresql+psycopg://me:hush@db:port/shed")
    with pytest.raises(DatabaseUnusable) as refused, locked(settings):
        pass
    assert "TRAINSHED_DATABASE_URL is no URL" in str(refused.value)
    assert "hush" not in str(refused.value)
