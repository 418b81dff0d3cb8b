"""Choice of the family of a spec's model."""

from train_loop.code.use import own_code
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.family import Family
from train_loop.model.families.own import OwnModels
from train_loop.spec import JobSpec


def family_of(spec: JobSpec) -> Family:
    """Return the family of a spec's model: own code, or a causal language model of transformers. Raises ModelError."""
    return CAUSAL if spec.code is None else OwnModels(own_code(spec.code))
