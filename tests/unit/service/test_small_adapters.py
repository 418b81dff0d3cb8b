"""Keys, preflight and settings."""

import os
import stat
import sys
from pathlib import Path

import pytest

from service.adapters.keys import ensure_key
from service.adapters.preflight import HelperPreflight
from service.errors import PreflightFailed
from service.ports import Findings
from service.settings import Settings
from tests.support.folders import write_model, write_tokenizer
from tests.support.service import a_spec
from tests.support.specs import TINY
from train_loop.plan import read_shape
from train_loop.spec import Problem


def test_key_is_random_kept_and_for_its_owner_alone(tmp_path: Path) -> None:
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


def test_key_file_left_empty_by_a_crash_gets_a_key(tmp_path: Path) -> None:
    (tmp_path / "admin.key").touch()
    assert ensure_key(tmp_path / "admin.key")


def preflight(code: str, *, timeout: float = 30.0) -> HelperPreflight:
    return HelperPreflight(roots=["file:///data"], timeout=timeout, command=[sys.executable, "-c", code])


def test_preflight_is_told_spec_and_roots_and_answers_problems() -> None:
    code = (
        "import json, sys; asked = json.load(sys.stdin); "
        "print(json.dumps({'problems': [{'pointer': asked['spec']['name'], 'message': asked['roots'][0]}], "
        "'shape': None}))"
    )
    assert preflight(code).check(a_spec()) == Findings((Problem("tiny", "file:///data"),), None)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('a', file=sys.stderr); sys.exit('no disk')", "could not be looked at: no disk"),
        ("raise SystemExit(3)", "the helper said nothing"),
        ("print('hello')", "gave no answer"),
    ],
)
def test_preflight_that_fails_says_why(code: str, message: str) -> None:
    with pytest.raises(PreflightFailed, match=message):
        preflight(code).check(a_spec())


def test_preflight_that_hangs_is_ended() -> None:
    with pytest.raises(PreflightFailed, match=r"took over 0\.2 s"):
        preflight("import time; time.sleep(60)", timeout=0.2).check(a_spec())


def test_the_real_helper_tells_the_sizes_of_a_model_in_a_folder(tmp_path: Path) -> None:
    write_tokenizer(write_model(tmp_path))
    spec = a_spec(model={"config": None, "path": tmp_path.as_uri()})
    found = HelperPreflight(roots=[tmp_path.as_uri()], timeout=100.0).check(spec)
    assert found == Findings((), read_shape(TINY))


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", "/srv/shed")
    monkeypatch.setenv("TRAINSHED_STORAGE_ROOTS", "file:///a, file:///b")
    monkeypatch.setenv("TRAINSHED_RAY_ADDRESS", "")
    settings = Settings()
    assert settings.roots == ("file:///srv/shed/runs", "file:///a", "file:///b")
    assert settings.database == "sqlite:////srv/shed/trainshed.db"
    assert settings.ray_address is None
    assert settings.ray_cpus >= 2
