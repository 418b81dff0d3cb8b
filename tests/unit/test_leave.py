"""Exit of a finished rank."""

import subprocess
import sys

PROGRAM = """
import atexit, logging, os, sys
from train_loop.system.exit import leave

class Abort:
    def __del__(self):
        os.abort()  # what threads of gloo do to an interpreter that is being finalized

atexit.register(os.abort)
abort = Abort()
logging.basicConfig(stream=sys.stdout)
logging.warning("logged")
sys.stdout.write("said")  # stays in the buffer: no end of line
leave()
"""


def test_leave_flushes_output_and_skips_finalization() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("logged\nsaid")
