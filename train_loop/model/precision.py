"""Dtypes of modules by pattern: `strategy.precision`."""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.spec import StrategySpec
from train_loop.spec.model import Dtype

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called: another dtype begins at their children."""


@dataclass(frozen=True)
class Precision:
    """The dtypes in which the modules of a model compute."""

    dtypes: Mapping[nn.Module, Dtype]
    """Dtype of each module."""
    around: Mapping[nn.Module, Dtype]
    """Dtype of the module that calls each module."""
    units: tuple[nn.Module, ...]
    """Modules with another dtype than the one around them, in module order; each is an FSDP unit."""
    named: frozenset[nn.Module]
    """Modules that a pattern matches without a module around them: norms of these ignore `norm_dtype`."""


def find_precision(anatomy: Anatomy, strategy: StrategySpec) -> Precision:
    """Return the dtypes of a model's modules. Call it before FSDP2 changes the classes of modules.

    A pattern is the path of a module, or a glob in which * matches any characters. It covers the modules that it
    matches, and all modules inside of them. Of several patterns that cover a module, the last one counts. Tied
    embeddings and head are one parameter, for which the last pattern of both counts. Raises ModelError.
    """
    model, patterns = anatomy.model, tuple(strategy.precision)
    (places, named), values = _places(model, patterns), (*strategy.precision.values(), strategy.param_dtype)
    if anatomy.is_tied:
        ends = [one for one in (anatomy.embeddings, anatomy.head) if one is not None]
        places |= dict.fromkeys(ends, max(places[one] for one in ends))
    # A place of -1 is that of the compute dtype.
    dtypes = {module: values[place] for module, place in places.items()}
    around = dict(_around(model, dtypes, strategy.param_dtype))
    found = Precision(
        dtypes,
        around,
        units=tuple(one for one in around if dtypes[one] != around[one] and any(True for _ in one.parameters())),
        named=frozenset(named),
    )
    _check(anatomy, found, strategy.param_dtype)
    return found


def attends_in_fp32(model: nn.Module, strategy: StrategySpec) -> bool:
    """Return whether a module of attention computes in fp32 by a pattern."""
    values = (*strategy.precision.values(), strategy.param_dtype)
    return bool(strategy.precision) and any(
        place >= 0 and values[place] == "fp32" and "Attention" in type(module).__name__
        for module, place in _places(model, tuple(strategy.precision))[0].items()
    )


def _places(model: nn.Module, patterns: Sequence[str]) -> tuple[dict[nn.Module, int], set[nn.Module]]:
    """Return the number of the pattern that counts for each module, -1 without one, and the named modules.

    Raises ModelError for a pattern that matches nothing.
    """
    names, places, named = {one: name for name, one in model.named_modules()}, dict[nn.Module, int](), set[nn.Module]()
    matched = set[int]()

    def visit(module: nn.Module, around: frozenset[int]) -> None:
        own = {number for number, pattern in enumerate(patterns) if _matches(names[module], pattern)}
        if any(True for _ in module.parameters()):
            matched.update(own)
        if own - around:
            named.add(module)
        places[module] = max(own | around, default=-1)
        for child in module.children():
            if child not in places:
                visit(child, around | own)

    visit(model, frozenset())
    for number, pattern in enumerate(patterns):
        if number not in matched:
            raise ModelError(f"precision {pattern} matches no module with parameters; {_choices(model, pattern)}")
    return places, named


def _matches(name: str, pattern: str) -> bool:
    return name != "" and fnmatchcase(name, pattern)


def _choices(model: nn.Module, pattern: str) -> str:
    """Return paths that would match, as a phrase: those similar to a pattern, and the outermost ones."""
    names = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    near = difflib.get_close_matches(pattern, names, n=3)
    return f"choose for example {', '.join(dict.fromkeys([*near, *(n for n in names if n.count('.') < 2)]))}"


def _around(module: nn.Module, dtypes: Mapping[nn.Module, Dtype], outside: Dtype) -> Iterator[tuple[nn.Module, Dtype]]:
    """Yield the modules inside a module with the dtype of the module that calls each, in module order."""
    for child in module.children():
        yield child, outside
        yield from _around(child, dtypes, outside if isinstance(child, _CONTAINERS) else dtypes[child])


def _check(anatomy: Anatomy, found: Precision, compute: Dtype) -> None:
    """Raise ModelError for dtypes that cannot be, or that are not proven."""
    model, names = anatomy.model, {one: name for name, one in anatomy.model.named_modules()}
    for attention in (one for one in model.modules() if isinstance(one, nn.MultiheadAttention)):
        for inside in found.units:
            if inside is not attention and inside in set(attention.modules()):
                raise ModelError(
                    f"precision gives {names[inside]} another dtype than the attention around it, which uses its "
                    f"parameters without a call; name {names[attention]}"
                )
    owners = defaultdict[int, dict[Dtype, str]](dict)
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            owners[id(parameter)].setdefault(found.dtypes[module], f"{name}.{leaf}")
    for dtypes in owners.values():
        if len(dtypes) > 1:
            pairs = ", ".join(f"{name}: {dtype}" for dtype, name in dtypes.items())
            raise ModelError(f"precision gives one parameter two dtypes ({pairs}); give both modules the same")
    experts = anatomy.experts
    for module in () if experts is None else (*experts.modules, *experts.routers):
        if found.dtypes[module] != compute:
            raise ModelError(
                f"precision is not proven for {names[module]}, a part of a mixture of experts; name other modules"
            )
