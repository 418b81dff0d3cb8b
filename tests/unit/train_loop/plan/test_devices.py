"""Devices of workers: rejected names, warnings, and the attention that a GPU supports."""

from typing import Any

import pytest
import torch

from tests.support.builders.specs import spec
from train_loop.model.families.causal.attention import best_attention
from train_loop.plan import device_problems, forgotten_gpu
from train_loop.spec import ScalingSpec


def problems(each: dict[str, Any]) -> list[str]:
    found = device_problems(spec(scaling={"resources_per_worker": each}))
    assert all(problem.pointer == "/scaling/resources_per_worker" for problem in found)
    return [problem.message for problem in found]


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ({"TPU": 4.0}, "training on TPU is not supported; choose GPU, or only CPU"),
        ({"NPU": 1.0}, "training on NPU is not supported"),
        ({"neuron_cores": 1.0}, "training on neuron_cores is not supported"),
        ({"TPU-v4-8-head": 1.0}, "training on TPU-v4-8-head is not supported"),
        ({"gpu": 1.0}, "unknown resource 'gpu'; did you mean GPU?"),
        ({"GPUS": 1.0}, "unknown resource 'GPUS'; did you mean GPU?"),
        ({"cuda": 1.0}, "unknown resource 'cuda'; did you mean GPU?"),
        ({"cpus": 1.0}, "unknown resource 'cpus'; did you mean CPU?"),
        ({"Memory": 1.0}, "unknown resource 'Memory'; did you mean memory?"),
        ({"GPU": 0.5}, "GPU: 0.5 per worker is not supported"),
        ({"GPU": 2.0}, "GPU: 2 per worker is not supported: each worker is one rank with one device; set GPU: 1"),
    ],
)
def test_unsupported_device_is_rejected_by_name(each: dict[str, Any], message: str) -> None:
    (found,) = problems({"CPU": 1.0} | each)
    assert found.startswith(message)


@pytest.mark.parametrize(
    "each", [{}, {"GPU": 1.0}, {"GPU": 0.0}, {"memory": 2.0**30}, {"spot": 1.0}, {"fast_disk": 0.1}]
)
def test_gpus_cpus_memory_and_custom_resources_are_accepted(each: dict[str, Any]) -> None:
    assert problems({"CPU": 0.5} | each) == []


@pytest.mark.parametrize("gpu", [0.0, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reproducible", ["same_size", "any_size"])
def test_any_size_does_not_compile_on_gpus(gpu: float, compiled: bool, reproducible: str) -> None:
    job = spec(
        model={"compile": compiled},
        training={"reproducible": reproducible, "global_batch_size": 8},
        scaling={"resources_per_worker": {"CPU": 1.0, "GPU": gpu}},
    )
    found = [problem.pointer for problem in device_problems(job)]
    assert found == (["/model/compile"] if gpu and compiled and reproducible == "any_size" else [])


@pytest.mark.parametrize("gpu", [0.0, 1.0])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_of_gpus_needs_one(gpu: float, attention: str) -> None:
    job = spec(
        model={"attn_implementation": attention, "dtype": "bf16"},
        scaling={"resources_per_worker": {"CPU": 1.0, "GPU": gpu}},
    )
    found = [(problem.pointer, problem.message) for problem in device_problems(job)]
    message = (
        f"attn_implementation={attention} needs a GPU, which a worker does not request; choose auto or sdpa, or add "
        "GPU: 1 to scaling.resources_per_worker"
    )
    assert found == ([] if gpu or attention in ("auto", "sdpa") else [("/model/attn_implementation", message)])


def test_job_without_gpus_gets_a_warning_on_a_cluster_with_gpus() -> None:
    without, with_one = ScalingSpec(), ScalingSpec(resources_per_worker={"CPU": 1.0, "GPU": 1.0})
    warning = forgotten_gpu(without, {"CPU": 8.0, "GPU": 4.0})
    assert warning is not None
    assert "the job requests no GPU and trains on CPUs, but the cluster has 4 GPU" in warning
    assert forgotten_gpu(with_one, {"GPU": 4.0}) is None
    assert forgotten_gpu(without, {"CPU": 8.0}) is None


BOTH = ["flash_attention_3", "flash_attention_2"]


@pytest.mark.parametrize(
    ("major", "installed", "expected"),
    [
        (9, BOTH, "flash_attention_3"),
        (9, BOTH[1:], "flash_attention_2"),
        (8, BOTH, "flash_attention_2"),
        (8, BOTH[:1], "sdpa"),
        (10, BOTH, "flash_attention_2"),
        (7, BOTH, "sdpa"),
    ],
)
def test_auto_selects_the_flash_attention_of_the_gpu(major: int, installed: list[str], expected: str) -> None:
    job = spec(model={"dtype": "bf16"}, strategy={"param_dtype": "bf16"})
    device = torch.device("cuda")
    assert best_attention(job, device, major=major, installed=installed) == expected
    assert best_attention(spec(), device, major=major, installed=installed) == "sdpa"
    assert best_attention(job, torch.device("cpu"), major=0, installed=installed) == "sdpa"
