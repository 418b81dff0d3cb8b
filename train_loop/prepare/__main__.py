"""`python -m train_loop.prepare SPEC.yaml`: prepare a spec's data with Ray Data, for a run without the service."""

import atexit
import os
import runpy
import shutil

from train_loop.system.private_folder import make_private_folder
from train_loop.system.ray_env import OWN_RAY_VARIABLE
from train_loop.system.ray_loopback import loopback_environment


def main() -> None:
    """Run the command. Unless RAY_ADDRESS names a cluster, set the variables of the Ray that it may start.

    Ray reads them when it is imported, so this module must not import Ray.
    """
    if not os.environ.get("RAY_ADDRESS"):
        folder = make_private_folder()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ |= loopback_environment(folder) | {OWN_RAY_VARIABLE: folder}
    runpy.run_module("train_loop.prepare.command", run_name="__main__")


if __name__ == "__main__":
    main()
