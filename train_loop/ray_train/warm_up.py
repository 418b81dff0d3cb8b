"""Imports of a worker's modules in a process that Ray has started ahead: the setup hook of its runtime environment.

`system/ray_env.py` names `get_ready` as a string: this module imports the worker, which imports those environments.
"""

import importlib

from train_loop.system.gc import no_automatic_collection

_MODULES = "ray.train.v2._internal.execution.worker_group.worker", "train_loop.ray_train.worker"
"""Modules of Ray Train's worker, and of ours."""


def get_ready() -> None:
    """Import a worker's modules in a new process of Ray, before it accepts work.

    Ray runs the hook before the main loop of the process. In another thread the imports could meet those of a task:
    torch is then incomplete in one thread, and the process aborts.
    """
    with no_automatic_collection():
        for module in _MODULES:
            importlib.import_module(module)
