"""The memory of the host or of its container."""

from pathlib import Path

import psutil
import pytest

from service.config.host_memory import host_memory
from service.config.settings import Settings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"memory.max": "max"}, None),
        ("0::/", {"memory.max": str(GIB)}, GIB),
        ("0::/system.slice/a.service", {"system.slice/memory.max": f"{GIB}\n", "memory.max": "max"}, GIB),
        ("0::/../../host/path", {"memory.max": str(GIB)}, GIB),
        ("4:cpu:/a\n3:memory:/a/b\n0::/", {"memory/memory.limit_in_bytes": str(GIB)}, GIB),
        ("3:memory:/a", {"memory/a/memory.limit_in_bytes": str(1 << 63), "memory.max": "1"}, None),
        (None, {}, None),
    ],
)
def test_host_memory_is_the_lowest_limit_of_its_control_groups(
    tmp_path: Path, groups: str | None, files: dict[str, str], expected: int | None
) -> None:
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mounted" / name).write_text(text)
    found = host_memory(tmp_path / "cgroup", tmp_path / "mounted")
    assert found == (expected or psutil.virtual_memory().total)


def test_ranks_of_embedded_ray_have_less_memory_than_the_host() -> None:
    settings = Settings()
    assert settings.embedded_memory_bytes + settings.ray_object_store_bytes < 0.9 * host_memory()
    assert Settings(ray_memory_bytes=GIB).embedded_memory_bytes == GIB
