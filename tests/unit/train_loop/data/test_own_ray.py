"""The Ray that `python -m train_loop.prepare` starts for itself."""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray

from train_loop.data import ray_context
from train_loop.prepare import __main__ as launcher

TLS = ("RAY_USE_TLS", "RAY_TLS_SERVER_KEY", "RAY_TLS_SERVER_CERT", "RAY_TLS_CA_CERT")
TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Return a patch of an environment in which no variable of Ray is set; its end restores them all."""
    ours = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "TRAINSHED_OWN_RAY")
    for name in (*ours, *TLS, *TOKENS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: None)
    monkeypatch.setattr(launcher, "make_private_folder", lambda: tempfile.mkdtemp(dir=tmp_path))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    return monkeypatch


def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Start Ray after the launcher. Return the options of Ray and its variables."""
    seen = dict[str, object]()
    monkeypatch.setattr(ray, "init", lambda **options: seen.update(options, **os.environ))
    launcher.main()
    ray_context.start_ray()
    return seen


@pytest.mark.parametrize("given", [{}, {"RAY_ADDRESS": ""}, {"RAY_AUTH_TOKEN": "m"}, {"RAY_AUTH_TOKEN_PATH": "/t"}])
def test_own_ray_is_on_loopback_with_tls_and_a_token_of_its_own(
    environment: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    for name, value in given.items():
        environment.setenv(name, value)
    one, other = started(environment), started(environment)
    assert (one["address"], one["_node_ip_address"]) == ("local", "127.0.0.1")
    assert (one["RAY_USE_TLS"], one["RAY_AUTH_MODE"], one["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("1", "token", "0")
    assert len(str(one["RAY_AUTH_TOKEN"])) == 64
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]
    assert "RAY_AUTH_TOKEN_PATH" not in one


def test_cluster_that_ray_address_names_gets_no_variables_of_ours(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    seen = started(environment)
    assert not {*TLS, *TOKENS, "TRAINSHED_OWN_RAY", "address"} & seen.keys()


def test_launcher_does_not_import_ray() -> None:
    # Ray reads RAY_USE_TLS when it is imported.
    check = "import sys, train_loop.prepare.__main__; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
