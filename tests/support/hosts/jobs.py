"""Specs of jobs on test hosts."""

from pathlib import Path
from typing import Any

from tests.support.builders.specs import TINY, raw_spec
from tests.support.hosts.hosts import SHARED
from tests.support.ranks.torchrun import write_tokens


def host_job(shared: Path, **parts: dict[str, Any]) -> dict[str, Any]:
    """Return a tiny Qwen3 job on random tokens: four workers, Ulysses groups of two, a checkpoint every 20 steps."""
    data = shared / "data" / "tokens.parquet"
    if not data.exists():
        data.parent.mkdir(parents=True, exist_ok=True)
        write_tokens(data, rows=4000, length=32, vocab=TINY["vocab_size"])
    base: dict[str, dict[str, Any]] = {
        "data": {
            "train": {"path": f"file://{SHARED}/data/tokens.parquet"},
            "columns": {"input_ids": "ids"},
            "packing": False,
        },
        "training": {
            "max_steps": 60,
            "global_batch_size": 4,
            "per_device_train_batch_size": 2,
            "audit_samples": True,
        },
        # It would double the collectives of a step, which are what a step of so small a model takes.
        "model": {"gradient_checkpointing": "none"},
        "strategy": {"ulysses_size": 2},
        "checkpoint": {"every_steps": 20},
        "scaling": {"num_workers": 4, "resources_per_worker": {"CPU": 0.75}},
    }
    return raw_spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()})
