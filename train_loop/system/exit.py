"""The end of a rank's or a driver's process."""

import logging
import os
import sys
from typing import NoReturn

from train_loop.run_dir import flush_all


def leave(code: int = 0) -> NoReturn:
    """End this process as done, without Python's finalization.

    Threads of gloo outlive `destroy_process_group` where anything else still refers to a group, as FSDP2 does, and free
    the tensors of their last collective when they next get to run. If the interpreter is being finalized by then, the
    process aborts ("terminate called without an active exception", pytorch/pytorch#179291): a run that was done would
    look failed.
    """
    logging.shutdown()
    flush_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
