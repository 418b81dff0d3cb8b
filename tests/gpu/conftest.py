"""Tests that need a CUDA GPU. Without one they are skipped."""

import os
from pathlib import Path

import pytest
import torch

# cuBLAS needs this setting for equal bits in repeated runs; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder on a machine without a GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
