"""Checkpoints of one model that ranks share in several layouts: each is saved, and loaded in another."""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves_with_path

from tests.families.objectives import write_rows
from tests.families.parity import NONE
from tests.families.runs import Kind, Leg, train_leg
from tests.support.ranks.gradients import build
from train_loop.checkpoint.digest import digest_checkpoint
from train_loop.checkpoint.files.reader import CheckpointReader
from train_loop.checkpoint.parts import described
from train_loop.checkpoint.state_dict import tensors_of
from train_loop.loop.build import build_state
from train_loop.model.parts import own_parts
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec


def values_of(job: JobSpec) -> dict[str, Any]:
    """Return the tensors of a job's checkpoints, and the means of adafactor, which ranks hold in another way."""
    _, loss, mesh = build(job)
    factored = job.model_copy(update={"training": job.training.model_copy(update={"optimizer": "adafactor"})})
    state, means = (tensors_of(build_state(loss.anatomy, one, mesh, steps=2)) for one in (job, factored))
    states = {"optimizer": state["optimizer"]["state"], "means": means["optimizer"]["state"]}
    return states | {"model": state["model"], "ema": state["ema"]}


def leaves(values: dict[str, Any]) -> list[tuple[str, DTensor]]:
    """Return the sharded tensors of values by name."""
    found = tree_leaves_with_path(values)
    # The head of tied embeddings is the same tensor.
    names = (("".join(map(str, path)).replace("lm_head", "model.embed_tokens"), leaf) for path, leaf in found)
    return [(name, leaf) for name, leaf in names if isinstance(leaf, DTensor)]


def saved_in_each_layout(
    folder: Path, states: Mapping[str, dict[str, Any]], pairs: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Save in each layout and read in another, by pairs; return the digests, and the wrong tensors of each pair."""
    digests, faults = {}, {}
    for name, values in states.items():
        _fill(values)
        save(described(values), checkpoint_id=folder / name)
        digests[name] = digest_checkpoint(folder / name).sha256
    for source, name in pairs:
        for _, leaf in leaves(states[name]):
            leaf.to_local().zero_()
        load(described(states[name]), storage_reader=CheckpointReader(folder / source))
        faults[source, name] = wrong(states[name])
    return {"digests": digests, "faults": faults, "tensors": min(len(leaves(values)) for values in states.values())}


def _fill(values: dict[str, Any]) -> None:
    for name, leaf in leaves(values):
        whole = _whole_of(name, leaf)
        for own, box in own_parts(leaf):
            own.copy_(whole[box])


def _whole_of(name: str, like: Tensor) -> Tensor:
    numbers = torch.arange(like.numel(), dtype=torch.float32) + zlib.crc32(name.encode()) % 4096
    return numbers.view(like.shape).to(like.dtype)


def wrong(values: dict[str, Any]) -> list[str]:
    """Return the tensors of which a rank has other values than the whole one. A collective call."""
    mine = [
        name
        for name, leaf in leaves(values)
        if not all(torch.equal(own, _whole_of(name, leaf)[box]) for own, box in own_parts(leaf))
    ]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return sorted({name for names in found for name in names})


def train_runs(folder: Path, family: str, runs: Mapping[str, Iterable[Leg]]) -> None:
    """Train runs on the existing ranks, each in legs that resume from the one before."""
    for name, legs in runs.items():
        for attempt, leg in enumerate(legs, start=1):
            run_dir = RunDir(folder / name)
            if dist.get_rank() == 0:
                run_dir.write_fence(attempt)
                run_dir.stop_file.unlink(missing_ok=True)
            dist.barrier()
            train_leg(Kind(family, "token cross entropy", NONE, folder / "rows.parquet"), leg, run_dir.root, attempt)
            dist.barrier()  # the next attempt fences this one: no rank may still be flushing its journal


def folder_with_rows(folder: Path, seed: int) -> Path:
    """Write the rows of `train_runs`; return their folder."""
    return write_rows(folder, seed).parent
