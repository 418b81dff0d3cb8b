"""The Ray that `python -m train_loop.prepare` starts for itself."""

import atexit
import os

import pytest
import ray

from train_loop.data import ray_context


@pytest.mark.parametrize("given", [{}, {"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_TOKEN_PATH": "/etc/token"}], ids=str)
def test_own_ray_has_a_token_and_writes_none_to_the_home(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    names = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", *names):
        # Registers the variable, so that its value at the start is restored.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(atexit, "register", lambda *_: None)
    seen = list[dict[str, str]]()
    monkeypatch.setattr(ray, "init", lambda **_: seen.append({name: os.environ.get(name, "") for name in names}))
    ray_context.start_ray()
    token, path = seen[0].values()
    assert (token, path) == (given.get("RAY_AUTH_TOKEN", token), given.get("RAY_AUTH_TOKEN_PATH", ""))
    assert bool(path) != (len(token) >= 4)
