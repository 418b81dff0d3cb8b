"""Settings of the whole suite."""

import os

from hypothesis import settings

# One thread per process: ranks share the cores, and results do not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No deadlines: a shared machine is sometimes slow, which is not a fault of the code.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")
