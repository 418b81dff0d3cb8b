"""Errors in a sharded model's forward pass: the model's own errors end the run, those of lost peers do not."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import build, my_share, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches


def error_in_the_forward_pass(peer_leaves: bool, folder: Path, checkpointing: str) -> None:
    """Write the class of a rank's forward error if its model fails, or if the other rank has left."""
    job = spec(
        model={"config": TINY, "gradient_checkpointing": checkpointing},
        training={"per_device_train_batch_size": 2},
        scaling={"num_workers": 2},
    )
    model, loss, mesh = build(job)
    (batch,) = micro_batches(my_share(random_rows(4, 32, vocab=384, packed=True), mesh), 2, loss.anatomy, mesh)
    if peer_leaves and dist.get_rank() == 1:
        os._exit(0)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise IndexError("index out of range in self")

    if not peer_leaves:
        model.model.layers[1].mlp.act_fn.forward = fail
    try:
        loss(batch)
    except ModelError as error:
        (folder / str(dist.get_rank())).write_text(f"ModelError {error}")
    except RuntimeError as error:
        (folder / str(dist.get_rank())).write_text(f"RuntimeError {error}")
        # The ranks have no further collectives in common.
        os._exit(0)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_error_of_model_code_is_a_model_error_on_every_rank(tmp_path: Path, checkpointing: str) -> None:
    on_ranks(2, error_in_the_forward_pass, False, tmp_path, checkpointing)
    for rank in ("0", "1"):
        message = (tmp_path / rank).read_text()
        assert message.startswith("ModelError Qwen3ForCausalLM failed in its forward pass: IndexError: index out of")


def test_error_of_a_collective_whose_peer_left_is_not_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # return values of ranks that exit
        on_ranks(2, error_in_the_forward_pass, True, tmp_path, "full")
    assert (tmp_path / "0").read_text().startswith("RuntimeError")
