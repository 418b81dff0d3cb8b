"""A Ray head that exits when its standard input closes: `-m benchmarks.control_plane.first_step_cluster CPUS FILE`.

FILE receives the address of its dashboard.
"""

import sys
from pathlib import Path

import ray

from train_loop.run_dir import write_durably


def main() -> None:
    """Start Ray, and wait for the end of standard input."""
    context = ray.init(num_cpus=int(sys.argv[1]), include_dashboard=True)
    write_durably(Path(sys.argv[2]), f"http://{context.dashboard_url}")
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
