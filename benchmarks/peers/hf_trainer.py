"""Hugging Face's Trainer with Accelerate's FSDP2.

Accelerate 1.15 supports FSDP only on GPUs. On CPU ranks it silently ignores the plugin and trains with DDP, which does
not shard and is not comparable. `switch_on_fsdp` sets the state that it would set on a GPU.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from benchmarks.training.trace import Trace, check_sharded, trace_under_torchrun
from benchmarks.workload import Workload


class Rows(Dataset[dict[str, Tensor]]):
    """Token rows in memory."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens.flatten(0, 2)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Metrics(TrainerCallback):  # type: ignore[misc]
    """Callback that passes each step's loss to a function when the Trainer logs it."""

    def __init__(self, step_ended: Callable[[float], None]) -> None:
        self._step_ended = step_ended

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Pass on a step's loss; the summary at the end has none."""
        if "loss" in kwargs["logs"]:
            self._step_ended(float(kwargs["logs"]["loss"]))


def train(workload: Workload, folder: Path) -> Trace:
    """Train this rank's share."""
    trace = Trace()
    run_trainer(workload, folder, trace.step_ended)
    return trace


def steps(workload: Workload, folder: Path) -> Iterator[float]:
    """Train step by step; yield the loss of each. Between steps the Trainer's stack waits, in the same thread.

    A second thread would have another arena of memory, and neither loop the freed pages of the other.
    """
    caller = getcurrent()
    trainer = greenlet(lambda: run_trainer(workload, folder, caller.switch))
    loss = trainer.switch()
    while not trainer.dead:
        yield loss
        loss = trainer.switch()


def run_trainer(workload: Workload, folder: Path, step_ended: Callable[[float], None]) -> None:
    """Train this rank's share, and call a function with the loss of each step at its end."""
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=workload.first_model(folder),
            args=arguments(workload, output),
            train_dataset=Rows(workload.tokens(folder)),
            data_collator=collate,
            callbacks=[Metrics(step_ended)],
        )
        trainer.remove_callback(PrinterCallback)
        switch_on_fsdp(trainer)
        trainer.train()
        check_sharded(trainer.model)


def switch_on_fsdp(trainer: Trainer) -> None:
    """Make Accelerate use FSDP2 as the arguments ask."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows to a batch; there is nothing to pad."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def arguments(workload: Workload, output: str) -> TrainingArguments:
    """Return arguments for FSDP2 as in its guide, with a fused optimizer, and without other overhead than the loss."""
    return TrainingArguments(
        output_dir=output,
        use_cpu=True,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
        per_device_train_batch_size=workload.rows_per_rank,
        max_steps=workload.steps,
        train_sampling_strategy="sequential",
        learning_rate=workload.learning_rate,
        lr_scheduler_type="cosine",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=workload.max_grad_norm,
        seed=workload.seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    trace_under_torchrun(train)
