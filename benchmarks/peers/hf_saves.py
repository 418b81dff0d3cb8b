"""Saves with Hugging Face's Trainer: `torchrun -m benchmarks.peers.hf_saves OUT FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.checkpoints.blocks import Clock, ends_block, saves_after
from benchmarks.peers.hf_trainer import Rows, arguments, collate, switch_on_fsdp
from benchmarks.training.trace import check_sharded
from benchmarks.workload import Workload
from train_loop.system.exit import leave


class Saves(TrainerCallback):  # type: ignore[misc]
    """Callback that requests saves after the chosen steps; the Trainer saves before the next step begins."""

    def __init__(self) -> None:
        self.clock = Clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Request a save if one is due after this step."""
        control.should_save = saves_after(state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Record the end of a block; the previous step's save has finished."""
        if state.global_step and ends_block(state.global_step):
            self.clock.mark()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Record the end of the last block."""
        self.clock.mark()


def main() -> None:
    """Train, and write the seconds that saves added."""
    out, folder = map(Path, sys.argv[1:3])
    workload, saves = Workload.read(folder), Saves()
    options = arguments(workload, str(out.parent / "hf"))
    options.save_strategy = "steps"
    options.save_steps = 10**9
    trainer = Trainer(
        model=workload.first_model(folder),
        args=options,
        train_dataset=Rows(workload.tokens(folder)),
        data_collator=collate,
        callbacks=[saves],
    )
    trainer.remove_callback(PrinterCallback)
    switch_on_fsdp(trainer)
    # The default gathers the model on rank 0, which fails on CPU ranks.
    plugin = trainer.accelerator.state.fsdp_plugin
    plugin.state_dict_type = StateDictType.SHARDED_STATE_DICT
    plugin.state_dict_config = ShardedStateDictConfig(offload_to_cpu=True)
    trainer.train()
    check_sharded(trainer.model)
    saves.clock.write(out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
