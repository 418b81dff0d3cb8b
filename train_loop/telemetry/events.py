"""All events in `events.jsonl`, each with its meaning; the reference page of the docs is generated from this list."""

from collections.abc import Mapping
from types import MappingProxyType

EVENTS: Mapping[str, str] = MappingProxyType(
    {
        # The driver.
        "attempt_started": "the driver of an attempt has started; `node` is the Kubernetes node of the head, if known",
        "stopping": "the attempt was asked to stop (`mode`); `waits_for` explains what it waits for. `reason` is the "
        "planned end of the cluster's head, if that asked",
        "finished": "the attempt has ended; the fields are those of `outcome.json`",
        "moving": "the worker group has stopped to leave `hosts`, and starts again on other hosts",
        "sink_failed": "a metrics sink failed; it is retried, and training continues",
        # Data preparation.
        "waiting_for_preparation": "another job prepares the same data; this one waits for it",
        "training_tokenizer": "a tokenizer of `vocab_size` tokens is trained on the data",
        "preparing": "preparation of one source has started, with its number of files and bytes",
        "prepare_progress": "rows and tokens prepared so far, percentage, and estimated remaining seconds",
        "bad_rows_skipped": "bad rows were left out; the first of them are listed by file and line",
        "prepared": "the samples of the run are ready; counts of rows, tokens and samples for each source",
        # The controller of a worker group.
        "waiting_for_capacity": "the cluster lacks capacity for the worker group since `since`",
        "group_started": "a worker group has its ranks; `hosts` maps each rank to its host",
        "host_silent": "no heartbeat has arrived from a host for `seconds`",
        "host_lost": "a host of the worker group is lost",
        "stalled": "no step finishes; the ranks in `waiting` wait for those in `for`, which are in `phase`",
        "progressing": "the run, or the named host, makes progress again after `stalled` or `host_silent`",
        "workers_lost": "the worker group has failed; `cause`, ranks and hosts explain the loss",
        "storage_unavailable": "a storage root does not answer or is not mounted; writers retry",
        "storage_available": "the storage root answers again",
        # The ranks.
        "workers_ready": "all ranks of the worker group run and build the model",
        "continued": "the run starts from the checkpoint of another job, its parent",
        "optimizer_state_loaded": "the run starts at `step` with the optimizer state in `folder`",
        "micro_batch_chosen": "the workers have chosen the `size` of micro-batches for `device`, `because` of the "
        "`plan`, an earlier group (`kept`), or one that ran out of memory (`out_of_memory`)",
        "micro_batch_proven": "the first step with the chosen micro-batch had enough memory",
        "model_built": "what was chosen for the run: FSDP units by class (count, parameters and bytes of one), mesh, "
        "ranks by host, dtypes, attention, chunks of the loss, checkpointing, all and trained parameters, optimizer "
        "groups, cores, backend, linear layers in float8 (null without), and the module tree",
        "training_started": "the first step follows; mesh, batch, hosts and the step that the run resumes from",
        "expert_patch_not_needed": "apply_expert_patch changes nothing, for the stated reason",
        "compiled": "torch.compile has compiled, recompiled or split a graph",
        "profiled": "trace and memory snapshot of a step were written to `folder`",
        "step_skipped": "loss or gradients of a step were not finite, and the step was skipped",
        "loss_scale_lowered": "gradients overflowed in fp16, and the loss scale was lowered",
        "out_of_memory": "a rank ran out of device or host memory; the largest terms of the plan are in `estimate`",
        "preemption_notice": "hosts of some ranks will be taken away at `deadline`",
        "forecast_scored": "tokens per second and peak memory of the run, and what its plan expected on this device",
        "training_ended": "training has ended: succeeded, paused, cancelled, failed or moved",
        "work_started": "the ranks of a job that does not train begin; `kind`, and the row from which they resume",
        "work_ended": "their work has ended, as in `training_ended`",
        "data_reader_failed": "Ray Data failed; rank 0 reads its own rows until a new start of it delivers them",
        "results_committed": "a shard of results is committed, with its rows",
        "warning": "a message to the user; the run continues",
        # Checkpoints.
        "checkpoint_committed": "a checkpoint is committed, with its bytes and seconds",
        "checkpoint_delayed": "storage failed during a save, which is retried",
        "checkpoint_failed": "a save was given up; training continues until the next save",
        "checkpoint_rejected": "a damaged checkpoint was skipped and set aside",
        "exported": "the checkpoint of `step` was exported to `folder`, with files written at `completed`; of adapters "
        "with `form`, and merged ones with the largest `difference` of outputs, which is null if it was not measured; "
        "`include` names contents of the folder besides the model",
    }
)
"""Each event's name and meaning. A test compares the list with the code that writes events."""
