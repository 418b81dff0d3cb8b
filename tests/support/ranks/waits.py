"""Where a rank waits for others in a step, and whether its timer has stopped there."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from train_loop.telemetry.timers import ComputeTimer


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether a timer has stopped at each exchange of the ranks that share layers, and runs at each matrix product."""

    def __init__(self, group: str, timer: ComputeTimer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.group, self.timer = group, timer
        self.stopped, self.computed = list[bool](), list[bool]()
        self.kinds = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and self.group in args:
            self.stopped.append(self.timer._since is None)
            self.kinds[func.name().rpartition(":")[2]] += 1
        elif func.name() in ("aten::mm", "aten::addmm", "aten::t"):
            self.computed.append(self.timer._since is not None)
        return func(*args, **(kwargs or {}))
