"""Optimizers whose state lives in host memory, while parameters and gradients stay on the device.

FSDP2's CPUOffloadPolicy moves all three. Here the step still computes on the device: the state of a part of the
parameters is copied there, used, and copied back. The bits are therefore those of the optimizer without offloading.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from train_loop.optim.by_mesh import local_of
from train_loop.plan import STATE_PART_BYTES

_HOST = torch.device("cpu")
PART_BYTES = STATE_PART_BYTES


class HostState(Optimizer):
    """An optimizer that steps a part of its parameters after the other, each with its state on their device."""

    pin_memory = False
    """True if the host memory is pinned, so that copies need not wait."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one step to every parameter that has a gradient."""
        groups = [(group, group["params"]) for group in self.param_groups]
        try:
            for part in _parts(p for _, parameters in groups for p in parameters):
                own = {id(p) for p in part}
                for group, parameters in groups:
                    group["params"] = [p for p in parameters if id(p) in own]
                self._step_part(part)
        finally:
            for group, parameters in groups:
                group["params"] = parameters
        if torch.cuda.is_available():
            # A checkpoint reads the host memory, to which copies may still run.
            torch.cuda.current_stream().synchronize()

    def _step_part(self, part: list[Tensor]) -> None:
        homes = {p: dict(self.state[p]) for p in part if p in self.state}
        for parameter, home in homes.items():
            device = local_of(parameter).device
            self.state[parameter] = {name: self._moved(value, device) for name, value in home.items()}
        super().step()
        for parameter in part:
            home = homes.get(parameter, {})
            for name, value in self.state[parameter].items() if parameter in self.state else ():
                self.state[parameter][name] = self._brought_home(value, home.get(name))

    def _brought_home(self, value: Any, home: Any) -> Any:
        """Return a value of a state in host memory: in the memory that it had before the step, if it had some."""
        if home is value or not isinstance(home, Tensor):
            return self._moved(value, _HOST)
        local_of(home).copy_(local_of(value), non_blocking=True)
        return home

    def _moved(self, value: Any, device: torch.device) -> Any:
        # Counters of steps are where the optimizer wants them.
        if not isinstance(value, Tensor) or value.ndim == 0 or (local := local_of(value)).device == device:
            return value
        if device == _HOST:
            moved = torch.empty_like(local, device=_HOST, pin_memory=self.pin_memory)
            moved.copy_(local, non_blocking=True)
        else:
            moved = local.to(device, non_blocking=True)
        # from_local would move it to the device of the mesh.
        return DTensor(moved, value._spec, requires_grad=False) if isinstance(value, DTensor) else moved  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into host memory; torch would have all of it on the device first."""
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            if key in saved:
                self.state[parameter] = {name: self._moved(value, _HOST) for name, value in saved[key].items()}


def _parts(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive parameters of at most PART_BYTES on this rank, or a single one."""
    part, size = list[Tensor](), 0
    for parameter in parameters:
        if part and size + local_of(parameter).nbytes > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += local_of(parameter).nbytes
    if part:
        yield part
