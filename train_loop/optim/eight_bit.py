"""AdamW with 8-bit moments (Dettmers et al., 2022), from torchao if it is installed."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from train_loop.errors import UserError
from train_loop.extras import cannot_import

aten = torch.ops.aten


def adamw_8bit_class() -> Callable[..., Optimizer]:
    """Return torchao's AdamW8bit, ready for asynchronous checkpoints. Raises UserError if it cannot be imported."""
    try:
        # The only import of this optional dependency, which takes seconds.
        from torchao.optim import AdamW8bit  # noqa: PLC0415
        from torchao.optim.subclass_8bit import OptimState8bit  # noqa: PLC0415
    except ImportError as error:
        missing = cannot_import("optimizer=adamw_8bit", "torchao", error)
        raise UserError(f"{missing} on the workers, or choose adamw") from error
    OptimState8bit.implements([aten.clone.default, aten.zeros_like.default])(_copy_each_part)
    made: Callable[..., Optimizer] = AdamW8bit
    return made


def _copy_each_part(function: Any, types: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Apply clone or zeros_like to each part of a moment: checkpoint staging needs both, and torchao lacks them."""
    moment, device = arguments[0], options.get("device")
    codes, scale = (function(part).to(device) for part in (moment.codes, moment.scale))
    # The code table is a constant, which is never zeroed.
    return type(moment)(codes, scale, moment.qmap.to(device, copy=True), moment.signed, dtype=moment.dtype)
