"""The output of a spec, as the loop computes it."""

import logging

import torch.distributed as dist

from train_loop.data.dataset import Dataset
from train_loop.loop.infer.ends import Ends
from train_loop.loop.infer.generate import Generate
from train_loop.loop.infer.outputs import OUTPUTS, Output
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import InferJobSpec

log = logging.getLogger(__name__)


def build_output(spec: InferJobSpec, anatomy: Anatomy, dataset: Dataset) -> Output:
    """Return the output that a spec asks for. A collective call; raises DataError, ModelError."""
    if spec.infer.output != "generate":
        return OUTPUTS[spec.infer.output]
    # Rank 0 decides: ranks that call the model differently would wait for each other.
    cached = [anatomy.family.caches(anatomy.model, spec.run.positions) if dist.get_rank() == 0 else False]
    dist.broadcast_object_list(cached, src=0)
    if not cached[0]:
        log.warning(
            "%s has states that a cache of earlier tokens does not keep exactly, so each new token is computed with "
            "all tokens before it",
            type(anatomy.model).__name__,
        )
    return Generate(spec.infer.generation, Ends.of(spec, dataset.tokenizer), cached=cached[0])
