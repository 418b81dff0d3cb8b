"""The norm of gradients that are sharded over several meshes, or replicated on some axes of them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def norm_by_parts(model: nn.Module, device: torch.device) -> Tensor:
    """Return the norm of all gradients over all ranks, in float32. A collective call.

    Each part of a gradient counts once: a rank leaves out parts that an earlier rank of an axis holds, too.
    """
    own = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor) and _is_first(p.grad)]
    squares = torch.zeros((), dtype=torch.float32, device=device)
    if own:
        squares += torch.stack(torch._foreach_norm(own, dtype=torch.float32)).to(device).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _is_first(gradient: DTensor) -> bool:
    places = gradient.device_mesh.get_coordinate() or ()
    return not any(
        place for place, kind in zip(places, gradient.placements, strict=True) if isinstance(kind, Replicate)
    )
