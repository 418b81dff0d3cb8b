"""The examples for users of other tools run through POST /jobs at toy size, with MORE=1."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.domain.jobs.job import JobState
from tests.support.builders.specs import TINY
from tests.support.servers.live import LiveService
from train_loop.spec import dump, override, parse_text

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif("MORE" not in os.environ, reason="four jobs: `make more` runs it"),
]
SMALLER: dict[str, dict[str, Any]] = {
    "roll": {
        "strategy": {"fsdp_size": 2},
        "scaling": {"num_workers": 4},
        "training": {"gradient_accumulation_steps": 2},
    },
    "fsdp1": {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}},
    "accelerate": {"strategy": {"fsdp_size": 0}},
    "trainer": {},
}
"""What each example changes to fit two workers, or four."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    service = LiveService(tmp_path_factory.mktemp("home"))
    try:
        service.start()
        yield service
    finally:
        service.stop()


@pytest.mark.parametrize("name", SMALLER)
def test_example_trains_at_toy_size(service: LiveService, name: str) -> None:
    example = parse_text(Path(f"examples/coming-from/{name}.yaml").read_text())
    toy: dict[str, dict[str, Any]] = {
        "model": {"path": None, "config": TINY},
        "data": {"train": {"path": "stdlib://json/*.py"}, "sequence_length": 32},
        "training": {"num_train_epochs": None, "max_steps": 3, "per_device_train_batch_size": 1, "logging_steps": 1},
        "scaling": {"num_workers": 2, "resources_per_worker": {"CPU": 0.25}},
    }
    spec = override(override(example, toy), SMALLER[name])
    job = service.client.submit(dump(spec))
    service.wait_for_state(job.id, JobState.SUCCEEDED)
    lines = service.metrics(job.id)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(5.0 < line["loss"] < 7.0 for line in lines)
