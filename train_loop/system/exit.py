"""Exit of a rank's or a driver's process."""

import logging
import os
import sys
from typing import NoReturn

from train_loop.run_dir import flush_all


def leave(code: int = 0) -> NoReturn:
    """Exit this process without Python's finalization.

    Threads of gloo outlive `destroy_process_group` if other objects, such as FSDP2's, still refer to a group. When they
    next run, they free the tensors of their last collective. If the interpreter is finalizing by then, the process
    aborts ("terminate called without an active exception", pytorch/pytorch#179291). A finished run would look failed.
    """
    logging.shutdown()
    flush_all()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
