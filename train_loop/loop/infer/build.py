"""The output of a spec, as the loop computes it."""

import torch.distributed as dist

from train_loop.data.dataset import Dataset
from train_loop.loop.infer.ends import Ends
from train_loop.loop.infer.generate import Generate
from train_loop.loop.infer.outputs import OUTPUTS, Output
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import InferJobSpec
from train_loop.telemetry.event_log import EventLog


def build_output(spec: InferJobSpec, anatomy: Anatomy, dataset: Dataset, journal: EventLog) -> Output:
    """Return the output that a spec asks for. A collective call; raises DataError, ModelError."""
    if spec.infer.output != "generate":
        return OUTPUTS[spec.infer.output]
    # Rank 0 decides: ranks that call the model differently would wait for each other.
    cached = [anatomy.family.caches(anatomy.model, spec.run.positions) if dist.get_rank() == 0 else False]
    dist.broadcast_object_list(cached, src=0)
    if not cached[0]:
        journal.warn(
            "a cache would not keep the states of this model exactly, so that each new token is computed with all "
            "tokens before it; choose another model, or fewer tokens, if this is too slow"
        )
    return Generate(spec.infer.generation, Ends.of(spec, dataset.tokenizer), cached=cached[0])
