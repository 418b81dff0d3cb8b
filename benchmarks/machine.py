"""Description of the machine, versions and commit of a measurement."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("torch", "transformers", "ray", "accelerate", "lightning", "datasets", "tokenizers", "numpy", "pyarrow")


def describe_machine() -> dict[str, Any]:
    """Return CPU, cores, memory, device, load, versions and commit."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the measured commit, marked as dirty if files differ from it; None outside a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
