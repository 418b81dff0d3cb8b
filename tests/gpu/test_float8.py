"""Linear layers in float8 on a GPU: near the emulation on the CPU, or refused by a GPU that is too old."""

from typing import Any

import pytest
import torch

from tests.gpu.processes import in_processes
from tests.gpu.test_gradients import QWEN3
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import CPU, one_step, random_rows

pytest.importorskip("torchao", reason="torchao is an optional dependency, which is not installed here")
SAMPLES, LENGTH = 4, 128
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"strategy": {"float8": "tensorwise"}},
    "rowwise": {"strategy": {"float8": "rowwise"}},
    "compiled": {"strategy": {"float8": "tensorwise"}, "model": {"compile": True}},
    "tiles of odd numbers of tokens": {
        "strategy": {"float8": "rowwise", "apply_tiled_mlp": True, "tiled_num_shards": 3}
    },
}


def steps(device: str) -> dict[str, Any]:
    """Return loss and gradients on a device for each setting, or its error."""
    rows, found = random_rows(SAMPLES, LENGTH, vocab=TINY["vocab_size"], packed=True), dict[str, Any]()
    for name, parts in SETTINGS.items():
        job = spec(
            model={"config": QWEN3, "dtype": "bf16"} | ({} if device == "cpu" else parts.get("model", {})),
            data={"sequence_length": LENGTH},
            training={"per_device_train_batch_size": SAMPLES},
            strategy=parts.get("strategy", {}),
        )
        try:
            loss, gradients = one_step(job, rows, torch.device(device, 0) if device == "cuda" else CPU)
            found[name] = loss, {of.replace("_orig_mod.", ""): one.cpu() for of, one in gradients.items()}
        except Exception as error:
            found[name] = repr(error)
    return found


@pytest.fixture(scope="module")
def results() -> tuple[dict[str, Any], dict[str, Any]]:
    [on_gpu], [on_cpu] = in_processes(1, steps, "cuda"), in_processes(1, steps, "cpu")
    return on_gpu, on_cpu


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "bf16"])
def test_gpu_computes_near_the_emulation(results: Any, name: str) -> None:
    found, expected = (of[name] for of in results)
    if torch.cuda.get_device_capability() < (8, 9):
        assert "needs a GPU of compute capability 8.9 or later" in found
        return
    assert not isinstance(found, str), found
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    assert found[0] != results[0]["bf16"][0]
    for of, value in expected[1].items():
        # Both round to float8, and activations that differ in the last bit of bf16 may round otherwise.
        assert (found[1][of] - value).norm() <= 0.1 * value.norm(), of
