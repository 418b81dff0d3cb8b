"""Seconds per optimizer step: Trainshed, under torchrun and through POST /jobs, against a bare FSDP2 loop and peers.

`python -m benchmarks.training.step_overhead [--rounds N] [--quick] [--only NAME ...]`. Every run is a separate start.
Startup time does not count.
"""

import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from benchmarks.harness import Measured, command_line, compare, interleave, parse, ratio_table, write_result
from benchmarks.launch import ProgramError, expect_starts, metrics, run_loop, run_module
from benchmarks.training.trace import Trace, measure
from benchmarks.workload import TOY, Workload
from examples.demo import service
from train_loop.run_dir import RunDir

BARE = "bare FSDP2 loop"
PEERS = {
    BARE: "benchmarks.peers.bare",
    "Hugging Face Trainer, Accelerate FSDP2 (by hand: Accelerate ignores it on CPUs)": "benchmarks.peers.hf_trainer",
    "Lightning Fabric FSDP2": "benchmarks.peers.fabric",
}
RAY = "Ray TorchTrainer around the bare loop"
OURS = "Trainshed, torchrun"
SERVICE = "Trainshed, POST /jobs"
POLL_SECONDS = 1.0


def main() -> None:
    """Run the comparison and write its table."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only programs whose names contain NAME")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks [%(default)s]")
    arguments = parse(parser)
    toy = Workload(config=TOY, sequence_length=32, steps=8, world=arguments.ranks)
    workload = toy if arguments.quick else Workload(world=arguments.ranks)
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        workload.write(Path(root, "workload"))
        chosen = {
            name: program
            for name, program in programs(workload, Path(root)).items()
            if name == BARE or arguments.only is None or any(part in name for part in arguments.only)
        }
        samples = interleave(chosen, arguments.rounds)
    rows = compare(samples, BARE)
    write_result(
        "step-overhead" if arguments.ranks == 2 else f"step-overhead-ranks-{arguments.ranks}",
        settings=workload.model_dump() | {"rounds": arguments.rounds, "quick": arguments.quick},
        data=samples,
        table=ratio_table(rows, what="seconds a step", baseline=BARE),
        folder=arguments.results,
    )


def programs(workload: Workload, root: Path) -> dict[str, Callable[[], Measured]]:
    """Return the compared programs, the baseline first; each call is one run in a new folder."""
    folder = root / "workload"

    def measured(run: Callable[[Path], Trace]) -> Measured:
        here = Path(tempfile.mkdtemp(dir=root))
        try:
            return measure(run(here), workload, root / "first.json")
        finally:
            shutil.rmtree(here, ignore_errors=True)

    def peer(module: str, ranks: int | None, here: Path) -> Trace:
        run_module(module, folder, here / "trace.json", log=here / "log", ranks=ranks)
        return Trace.read(here / "trace.json")

    def ours(here: Path) -> Trace:
        return Trace.of_metrics(run_loop(workload.spec(folder), here / "run", ranks=workload.world))

    runs: dict[str, Callable[[Path], Trace]] = {
        name: functools.partial(peer, module, workload.world) for name, module in PEERS.items()
    }
    runs[RAY] = functools.partial(peer, "benchmarks.peers.ray_trainer", None)
    runs |= {OURS: ours, SERVICE: functools.partial(through_service, workload, folder)}
    return {name: functools.partial(measured, run) for name, run in runs.items()}


def through_service(workload: Workload, folder: Path, here: Path) -> Trace:
    """Run one job on a new service with embedded Ray, and poll its state once a second."""
    data = here / "runs" / "data"
    data.mkdir(parents=True)
    shutil.copy(folder / "tokens.parquet", data)
    with service(here) as (client, _):
        job = client.submit(yaml.safe_dump(workload.spec(data)))
        while not job.state.terminal:
            time.sleep(POLL_SECONDS)
            job = client.job(job.id)
    if job.state != "SUCCEEDED":
        raise ProgramError(f"the job ended as {job.state}: {job.reason and job.reason.message}")
    expect_starts(job.run_dir, 1)
    return Trace.of_metrics(metrics(RunDir.at(job.run_dir).root))


if __name__ == "__main__":
    main()
