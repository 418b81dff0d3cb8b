"""Doctor check of the operator's key file."""

from pathlib import Path

import pytest

from service.config.settings import Settings
from trainshed.cli.home_checks import check_home


@pytest.mark.parametrize(
    ("mode", "mounted", "verdict"),
    [
        (0o600, False, "ok"),
        (0o640, False, "failed"),
        (0o644, False, "failed"),
        (None, False, "skipped"),
        # Kubernetes mounts a Secret with 0440 for a pod with an fsGroup, Docker Compose with 0444.
        (0o440, True, "ok"),
        (0o444, True, "warning"),
        (0o660, True, "failed"),
        (0o666, True, "failed"),
        (None, True, "failed"),
    ],
)
def test_key_readable_by_group_is_accepted_only_if_mounted(
    tmp_path: Path, mode: int | None, mounted: bool, verdict: str
) -> None:
    file = tmp_path / ("mounted" if mounted else "home/admin.key")
    file.parent.mkdir(exist_ok=True)
    if mode is not None:
        file.write_text(f"{'0' * 64}\n")
        file.chmod(mode)
    settings = Settings(home=tmp_path / "home", admin_key_file=file if mounted else None)
    (found,) = [one for one in check_home(settings, runs=True) if one.check == "home.key"]
    assert found.verdict.value == verdict, found
    assert found.verdict.value in ("ok", "skipped") or found.remedy


def test_short_key_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "admin.key").write_text("secret\n")
    (tmp_path / "admin.key").chmod(0o600)
    (found,) = [one for one in check_home(Settings(home=tmp_path), runs=True) if one.check == "home.key"]
    assert (found.verdict.value, "6 characters" in found.seen) == ("warning", True)
