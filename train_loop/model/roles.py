"""The role of each parameter, which decides about weight decay and about muon.

A role follows from the module that holds a parameter, and from its name there. Its number of dimensions does not tell:
rates of state spaces have two or three in some models, and vectors that mix tokens have three.
"""

from enum import IntEnum

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers.pytorch_utils import Conv1D

from train_loop.model.families.anatomy import Anatomy

_LINEAR = (nn.Linear, Conv1D, nn.MultiheadAttention)
_OTHERS = (_ConvNd, nn.RNNBase, nn.RNNCellBase, nn.Bilinear)
"""Modules of torch whose weights are no vectors, also those with a size of 1."""
_RATES, _SKIP = "A_log", "D"
"""Parameters of a state space: logarithms of its rates, and factors of its inputs (Gu and Dao, "Mamba", 2023)."""


class Role(IntEnum):
    """The role of a parameter, in order of precedence: tied ones have the first of theirs."""

    TABLE = 0
    """Rows of embeddings or of the head, one for each token, position or label."""
    MATRIX = 1
    """The matrix of a linear layer, or of each expert. Muon updates these alone."""
    WEIGHT = 2
    """Another weight, such as that of a convolution."""
    VECTOR = 3
    """A norm, a bias, a vector such as a gate, or a parameter of a state space. These do not decay."""


def roles_of(anatomy: Anatomy) -> dict[int, Role]:
    """Return the role of each parameter of a model, by id."""
    found = dict[int, Role]()
    for module in anatomy.model.modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            role = _role(anatomy, module, leaf, parameter)
            found[id(parameter)] = min(role, found.get(id(parameter), role))
    return found


def _role(anatomy: Anatomy, module: nn.Module, leaf: str, parameter: nn.Parameter) -> Role:
    if "bias" in leaf or (module, leaf) in anatomy.undecayed or _is_of_states(module, leaf):
        return Role.VECTOR
    if isinstance(module, nn.Embedding) or module is anatomy.head:
        return Role.TABLE
    if _is_map(anatomy, module, parameter):
        return Role.MATRIX
    if isinstance(module, _OTHERS) or sum(size > 1 for size in parameter.shape) > 1:
        return Role.WEIGHT
    return Role.VECTOR


def _is_map(anatomy: Anatomy, module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix of a linear layer, of a router, or of each expert of a layer."""
    experts = anatomy.experts
    if experts is not None and module in experts.modules:
        return parameter.ndim == 3
    is_linear = isinstance(module, _LINEAR) or (experts is not None and module in experts.routers)
    return is_linear and parameter.ndim == 2


def _is_of_states(module: nn.Module, leaf: str) -> bool:
    return leaf == _RATES or (leaf == _SKIP and hasattr(module, _RATES))
