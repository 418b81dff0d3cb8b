"""The memory limit of a rank under an embedded Ray, and the memory of a host."""

import subprocess
import sys
from pathlib import Path

import pytest

from train_loop.system import memory_limit

RANK = """
import resource, sys
from train_loop.plan import WORKER_MEMORY_VARIABLE
from train_loop.system.memory_limit import limit_rank, mapped_bytes
before = mapped_bytes()
reserved = int(sys.argv[1]) << 20 if sys.argv[1:] else None
limit_rank({WORKER_MEMORY_VARIABLE: str(512 << 20)}, ranks=2, on_gpu="gpu" in sys.argv, reserved=reserved)
held = []
try:
    while len(held) < 144:
        held.append(bytearray(4 << 20))
except MemoryError:
    pass
print(len(held) * 4)
"""


@pytest.mark.parametrize(
    ("arguments", "mebibytes"),
    # A reservation leaves room for the stacks of threads that start later, 256 MiB.
    [([], range(200, 257)), (["192"], range(356, 449)), (["16"], range(200, 288)), (["192", "gpu"], range(576, 577))],
)
def test_rank_allocates_its_share_of_the_memory_and_no_more(arguments: list[str], mebibytes: range) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY)){RANK}"
    result = subprocess.run(
        [sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(result.stdout) in mebibytes


def test_memory_of_a_container_is_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "_GROUP", tmp_path)
    whole = memory_limit.host_bytes()
    for limit, expected in (("max\n", whole), (f"{1 << 62}\n", whole), (f"{1 << 20}\n", 1 << 20)):
        (tmp_path / "memory.max").write_text(limit)
        assert memory_limit.host_bytes() == expected
