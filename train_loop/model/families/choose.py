"""Choice of the family of a spec's model."""

from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.family import Family
from train_loop.spec import JobSpec


def family_of(_spec: JobSpec) -> Family:
    """Return the family of a spec's model: today each is a causal language model of transformers."""
    return CAUSAL
