"""Detection of tensors that a model's initialisation leaves unset, and the rules that transformers lacks."""

import torch
from torch import Tensor, nn
from transformers.activations import XIELUActivation

_BYTE = 0xAA
"""Byte of an unset boolean, which is neither False nor True."""


def unset_like(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same shape and dtype with values that no initialisation gives: NaN in floats."""
    empty = torch.empty_like(tensor, device="cpu")
    if empty.dtype == torch.bool:
        empty.view(torch.uint8).fill_(_BYTE)
        return empty
    return empty.fill_(float("nan") if _has_nan(empty) else torch.iinfo(empty.dtype).min)


def is_unset(tensor: Tensor) -> bool:
    """Return whether any element of a tensor from `unset_like` is still unset."""
    if tensor.dtype == torch.bool:
        return bool((tensor.contiguous().view(torch.uint8) == _BYTE).any())
    return bool((tensor.isnan() if _has_nan(tensor) else tensor == torch.iinfo(tensor.dtype).min).any())


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def set_own(module: nn.Module) -> None:
    """Set values that transformers sets only in a module's constructor: a build on meta loses them."""
    if isinstance(module, XIELUActivation):
        # Constructor defaults of its alphas, which no model changes; softplus inverts expm1().log().
        beta, eps = module._beta_scalar, module._eps_scalar
        for parameter, value in ((module.alpha_p, 0.8), (module.alpha_n, 0.8 - beta)):
            parameter.copy_(torch.tensor(value, dtype=parameter.dtype).expm1().log())
        module.beta.fill_(beta)
        module.eps.fill_(eps)
    # Compared by name: an import of its family would slow down the start of every rank.
    elif type(module).__name__ == "Data2VecTextLMHead":
        module.get_parameter("bias").zero_()
