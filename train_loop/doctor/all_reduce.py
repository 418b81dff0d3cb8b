"""`python -m train_loop.doctor.all_reduce --rank R --world N --master HOST:PORT`: one all-reduce with other hosts.

`train_loop.doctor.node_check` runs it on every host. A separate process can be killed if the network drops its packets.
"""

import argparse
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from train_loop.parallel.process_group import Meeting, meet_at
from train_loop.system.exit import leave

_ELEMENTS = 1 << 18
"""Elements of the tensor, 1 MiB: more than the first packet holds."""


def main() -> None:
    """Take part in one all-reduce; exit 0 if its result is correct."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.doctor.all_reduce", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    timeout = timedelta(seconds=arguments.seconds)
    store = meeting(arguments.master, serve=arguments.rank == 0).open(arguments.world, timeout)
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.world, timeout=timeout)
    numbers = torch.full((_ELEMENTS,), float(arguments.rank + 1))
    dist.all_reduce(numbers)
    expected = arguments.world * (arguments.world + 1) / 2
    if not torch.all(numbers == expected):
        sys.exit(f"wrong sum {numbers[0].item()}; expected {expected}")
    dist.destroy_process_group()
    # A normal exit could abort the process, because threads of gloo may still run.
    leave(0)


def meeting(place: str, *, serve: bool) -> Meeting:
    """Return the store at HOST:PORT; with `serve`, this process listens there."""
    host, _, port = place.rpartition(":")
    address = host.strip("[]")
    return meet_at(address, int(port)) if serve else Meeting(address=address, port=int(port))


if __name__ == "__main__":
    main()
