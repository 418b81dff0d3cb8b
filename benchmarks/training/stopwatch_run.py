"""Trainshed's loop with timed all-to-alls: `torchrun -m benchmarks.training.stopwatch_run OUT SPEC --run-dir DIR`.

Every rank writes OUT.RANK: [Unix time of its end, seconds] for each all-to-all. A collective on the CPU returns when it
is done, so that the wait for the slower rank counts as well.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from train_loop import run
from train_loop.system.exit import leave


def main() -> None:
    """Run the loop, then write the times."""
    out, exchange, taken = Path(sys.argv.pop(1)), dist.all_to_all_single, []

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        done = exchange(*arguments, **named)
        taken.append((time.time(), time.perf_counter() - began))
        return done

    dist.all_to_all_single = timed
    run.main()
    out.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(taken))


if __name__ == "__main__":
    main()
    leave()
