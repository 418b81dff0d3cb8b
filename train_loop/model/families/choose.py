"""Choice of the family of a spec's model."""

from train_loop.code.use import own_code
from train_loop.model.families.causal.build import sees_whole_rows
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.family import Family
from train_loop.model.families.masked import MASKED
from train_loop.model.families.own import OwnModels
from train_loop.spec import JobSpec


def family_of(spec: JobSpec) -> Family:
    """Return the family of a spec's model: own code, or language models of transformers. Raises ModelError."""
    if spec.code is not None:
        return OwnModels(own_code(spec.code))
    return MASKED if sees_whole_rows(spec.model) else CAUSAL
