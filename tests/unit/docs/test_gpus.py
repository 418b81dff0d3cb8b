"""The table of GPUs that models need: its numbers are the plan's."""

import pytest

from tools.docs.gpus import DEVICES, LENGTH, METHODS, MODELS, WORKERS, fewest, job_of, page
from train_loop.plan import device_named, fit_on, plan_job, read_shape
from train_loop.spec import parse

SIZES = {"0.6B": 0.596, "1.7B": 1.72, "32B": 32.8, "1B": 1.24, "8B": 8.1, "70B": 70.6}
"""Billions of parameters by the models' cards."""

STATE = ("frozen_parameters", "parameters", "gradients", "optimizer")


@pytest.mark.parametrize("model", MODELS)
def test_configs_have_the_published_numbers_of_parameters(model: str) -> None:
    size = model.split()[-1]
    expected = SIZES.get(size, float(size.removesuffix("B")))
    assert read_shape(MODELS[model]).parameters / 1e9 == pytest.approx(expected, rel=0.08)


def test_model_does_not_fit_fewer_gpus() -> None:
    config, device = MODELS["Llama 3.1 8B"], device_named("a100-80g")
    found = {}
    for workers in WORKERS[:3]:
        scaling = {"num_workers": workers, "resources_per_worker": {"CPU": 8, "GPU": 1}}
        raw = {
            "name": "a",
            "model": {"config": config, "attn_implementation": "flex_attention"},
            "data": {"train": {"path": "/a"}, "columns": {"input_ids": "ids"}, "sequence_length": LENGTH},
            "training": {"learning_rate": 1e-5},
            "scaling": scaling,
        }
        job = parse(raw)
        found[workers] = fit_on(job, plan_job(job, read_shape(config)), device).verdict == "fits"
    assert found == {1: False, 2: True, 4: True}
    assert fewest(config, "a100-80g", {}).startswith("2 (")


@pytest.mark.parametrize("method", ["LoRA", "QLoRA"])
def test_cell_of_adapters_has_the_bytes_of_the_guide(method: str) -> None:
    """Frozen weights and adapters by docs/guides/lora.md and small-numbers.md, for Llama 3.1 8B on one GPU."""
    hidden, key, inner, vocab, layers, r = 4096, 1024, 14336, 128256, 32, 16
    linear = 2 * hidden * hidden + 2 * hidden * key + 3 * hidden * inner
    frozen = layers * (linear + 2 * hidden) + 2 * vocab * hidden + hidden
    adapters = r * layers * (2 * (hidden + hidden) + 2 * (hidden + key) + 3 * (hidden + inner))
    quantised = layers * linear if method == "QLoRA" else 0
    certain = (0.5 + 2 / 64) * quantised + 2 * (frozen - quantised) + 16 * adapters
    config, patch = MODELS["Llama 3.1 8B"], next(one for title, one in METHODS.items() if title.startswith(method))
    job = job_of(config, 1, patch)
    plan = plan_job(job, read_shape(config).adapted(job.model))
    parts = [term.bytes for term in plan.memory if term.name in STATE]
    assert sum(parts) == pytest.approx(certain, abs=1)
    # Besides: the gathered head, a layer's activations, and a chunk of logits.
    assert 1 < (plan.memory_bytes - certain) / 2**30 < 4
    assert fewest(config, "l40s", patch) == f"1 ({plan.memory_bytes / 2**30:.0f})"


def test_page_has_each_model_with_each_method() -> None:
    text = page()
    for model in MODELS:
        assert text.count(f"| {model} |") == len(METHODS) + 1
    assert text.count(f"| {device_named(DEVICES[0]).title}, ") == len(METHODS)
