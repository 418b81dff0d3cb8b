"""Lazy import of slow modules that only some commands need."""

import sys
from importlib.util import LazyLoader, find_spec, module_from_spec
from types import ModuleType


def lazily(name: str) -> ModuleType:
    """Return a module that is loaded at the first access to one of its attributes."""
    if name in sys.modules:
        return sys.modules[name]
    spec = find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
