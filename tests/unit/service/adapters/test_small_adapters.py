"""Key files and settings."""

import os
import stat
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service.adapters.key_files import ensure_key, read_key
from service.config.settings import Settings
from service.errors import KeyUnusable
from train_loop.run_dir import SinkName


def test_key_is_random_persistent_and_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key = ensure_key(tmp_path / "admin.key")
    finally:
        os.umask(before)
    assert (tmp_path / "admin.key").read_text() == key + "\n"
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert len(bytes.fromhex(key)) == 32
    assert ensure_key(tmp_path / "admin.key") == key
    assert ensure_key(tmp_path / "other.key") != key


@pytest.mark.parametrize(
    ("text", "mode", "rule"),
    [
        (b"a", 0o600, "has only 1 characters and can be guessed"),
        (b"0" * 64, 0o666, r"other users may write to it \(0666\); chmod 600"),
        (b"\xff\xfe", 0o600, "is not text"),
        (None, 0o700, "Is a directory"),
    ],
)
def test_insecure_or_invalid_key_file_is_rejected(tmp_path: Path, text: bytes | None, mode: int, rule: str) -> None:
    file = tmp_path / "admin.key"
    if text is None:
        file.mkdir()
    else:
        file.write_bytes(text)
    file.chmod(mode)
    for read in (ensure_key, partial(read_key, setting="TRAINSHED_ADMIN_KEY_FILE")):
        with pytest.raises(KeyUnusable, match=rule):
            read(file)


def test_short_or_readable_key_file_logs_warnings(tmp_path: Path) -> None:
    file = tmp_path / "admin.key"
    file.write_text("0123456789")
    file.chmod(0o644)
    with capture_logs() as logged:
        assert ensure_key(file) == "0123456789"
    assert [line["event"] for line in logged] == ["key_is_short", "key_is_readable"]


def test_key_file_left_empty_by_a_crash_gets_a_key(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch()
    assert ensure_key(tmp_path / "admin.key")


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", "/srv/shed")
    monkeypatch.setenv("TRAINSHED_STORAGE_ROOTS", "file:///a, file:///b")
    monkeypatch.setenv("TRAINSHED_RAY_ADDRESS", "")
    settings = Settings()
    assert settings.read_policy("nlp").roots == ("file:///srv/shed/runs", "file:///a", "file:///b")
    assert settings.database == "sqlite:////srv/shed/trainshed.db"
    assert settings.ray_address is None
    assert settings.ray_cpus >= 2


def test_storage_roots_may_be_set_per_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", "/srv/shed")
    monkeypatch.setenv("TRAINSHED_RUNS", "s3://runs/x")
    monkeypatch.setenv("TRAINSHED_CACHE", "/srv/cache")
    monkeypatch.setenv("TRAINSHED_STORAGE_ROOTS", '{"nlp": ["s3://nlp/"], "*": ["file:///shared"]}')
    settings = Settings()
    nlp, other = settings.read_policy("nlp"), settings.read_policy("other")
    assert nlp.roots == ("s3://runs/x", "file:///srv/shed/runs", "s3://nlp/", "file:///shared")
    assert other.roots == ("s3://runs/x", "file:///srv/shed/runs", "file:///shared")
    assert (nlp.runs, nlp.caches) == (nlp.roots[:2], ("file:///srv/shed/runs/_cache", "/srv/cache"))
    assert settings.all_roots == ("s3://nlp/", "file:///shared")


@pytest.mark.parametrize(
    ("value", "sinks"), [("", ("tensorboard",)), ("none", ()), ("wandb,tensorboard", ("tensorboard", "wandb"))]
)
def test_sinks_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, sinks: tuple[SinkName, ...]
) -> None:
    monkeypatch.setenv("TRAINSHED_SINKS", value)
    assert Settings().sinks == sinks


def test_unknown_sink_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_SINKS", "tensorbored")
    with pytest.raises(ValueError, match="names tensorbored; expected any of tensorboard, mlflow, wandb, or none"):
        Settings()
