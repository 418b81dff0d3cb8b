"""Detection of code that uses the parameters of an FSDP unit while the unit is not called."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train_loop.code.load import innermost_place
from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.parallel.units import find_units
from train_loop.spec import StrategySpec


class UnitUse(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that raises ModelError for a parameter that is used while FSDP2 has not gathered its unit.

    FSDP2 gathers a unit when it is called, and frees it afterwards. The root stays gathered after its first call, and
    `check_root` reports uses before it.
    """

    def __init__(self, anatomy: Anatomy, strategy: StrategySpec, folder: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        model, self._strategy, self._folder = anatomy.model, strategy, folder
        self._names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
        self._module_names = {module: name for name, module in model.named_modules()}
        self._unit_of = dict[int, nn.Module]()
        # Inner units come first: each parameter belongs to the innermost.
        for unit in [*find_units(anatomy, strategy.wrap_policy), [model]]:
            for parameter in [p for module in unit for p in module.parameters()]:
                self._unit_of.setdefault(id(parameter), unit[0])
        self._root, self._gathered = model, set[nn.Module]()
        self._before_root: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the calls of the units and the use of their parameters within the context."""
        hooks = []
        self._gathered.clear()
        for unit in set(self._unit_of.values()):
            hooks.append(unit.register_forward_pre_hook(partial(self._gather, unit)))
            hooks.append(unit.register_forward_hook(partial(self._free, unit)))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _gather(self, unit: nn.Module, *_: Any) -> None:
        self._gathered.add(unit)

    def _free(self, unit: nn.Module, *_: Any) -> None:
        reshard = self._strategy.reshard_after_forward
        if reshard is True or (reshard is not False and unit is not self._root):
            self._gathered.discard(unit)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            unit = self._unit_of.get(id(value))
            if unit is not None and unit not in self._gathered:
                self._report(self._names[id(value)], unit)
        return func(*args, **(kwargs or {}))

    def check_root(self) -> None:
        """Raise ModelError if a parameter of the root was used before the model was called."""
        if self._before_root is not None:
            raise ModelError(self._before_root)

    def _report(self, name: str, unit: nn.Module) -> None:
        place = innermost_place(traceback.extract_stack(), self._folder)
        policy, kind = self._strategy.wrap_policy, type(unit).__name__
        if unit is self._root:
            self._before_root = self._before_root or (
                f"{name} is used before the model is called{place}, and each rank has only a shard of it; call the "
                "model itself first"
            )
            return
        size = sum(parameter.numel() for parameter in unit.parameters())
        if policy.min_num_params is not None:
            other = f"set strategy.wrap_policy.min_num_params above {size}"
        elif policy.transformer_layer_cls_to_wrap:
            other = f"remove {kind} from strategy.wrap_policy.transformer_layer_cls_to_wrap"
        else:
            other = f"remove {kind} from _no_split_modules"
        raise ModelError(
            f"{name} is used while {self._module_names[unit]} ({kind}) is not called{place}; that is an FSDP unit, and "
            f"each rank then has only a shard of it; call {self._module_names[unit]}, or {other}"
        )
