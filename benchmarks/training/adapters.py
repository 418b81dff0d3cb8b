"""Low-rank adapters: steps against a bare FSDP2 loop and Hugging Face's Trainer, both with peft; memory; checkpoints.

`python -m benchmarks.training.adapters [--only PART ...] [--rounds N] [--quick] [--note TEXT]`. Parts: `steps` of
Trainshed and of one other program alternate in the same ranks, and a ratio is that of two neighbouring steps; `memory`
is the peak of a rank, which is the bytes of all tensors before the second step, plus the growth of resident memory in
it; `saves` are checkpoints of Trainshed's own runs, with adapters and with all weights; `gpu` is a case of
`benchmarks.training.gpu`, or the reason why it did not run.
"""

import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import (
    Measured,
    Sample,
    command_line,
    compare,
    interleave,
    markdown_table,
    pair_record,
    parse,
    write_result,
)
from benchmarks.launch import loop_arguments, run_loop, run_module
from benchmarks.training import gpu
from benchmarks.training.meshes import one_start, seconds_text
from benchmarks.training.peak_memory.options import ALLOCATOR
from benchmarks.training.turns import OURS
from benchmarks.workload import SMALL, TOY, Workload
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.run_dir import ReadPolicy
from train_loop.spec import parse as parse_spec

LLAMA = {"model_type": "llama"}
LORA = {"r": 16, "alpha": 32}
WORKLOAD = Workload(config=SMALL | LLAMA, steps=36, lora=LORA)
QUICK = {"config": TOY | LLAMA, "sequence_length": 32, "steps": 8}
PEERS = {
    "bare FSDP2 loop, peft": "benchmarks.peers.bare",
    "Hugging Face Trainer, peft, Accelerate FSDP2": "benchmarks.peers.hf_trainer",
}
RANKS = (1, 2)
ADAPTERS, FULL = "adapters", "all weights"
SAVE_EVERY = 4
GPU_CASE, GPU_GOAL = "llama3-8b-4k-lora", "12,473 (NVIDIA NeMo AutoModel, one H100)"
Found = tuple[Sequence[Any], list[dict[str, Any]]]
"""Raw data, and the rows of the table."""
_RATIO = "ratio, median [95 % interval]"
_STATE = ("frozen_parameters", "parameters", "optimizer", "gradients")
_FORWARD = ("activations", "attention_mask", "attention_scores", "logits")


def main() -> None:
    """Run the chosen measurements, and write a table of each at once."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="parts [%(choices)s]")
    parser.add_argument("--note", help="text for the raw data, such as other load of the machine")
    arguments = parse(parser, rounds=3)
    workload = WORKLOAD.model_copy(update=QUICK if arguments.quick else {})
    for name in arguments.only:
        data, records = PARTS[name](workload, arguments.rounds)
        write_result(
            f"adapters-{name}",
            settings=workload.model_dump()
            | {"rounds": arguments.rounds, "quick": arguments.quick, "note": arguments.note},
            data=data,
            table=markdown_table(records),
            folder=arguments.results,
        )


def on_ranks(workload: Workload, ranks: int) -> Workload:
    """Return the workload with a number of ranks."""
    return workload.model_copy(update={"world": ranks})


def steps(workload: Workload, rounds: int) -> Found:
    """Compare steps with those of each peer."""
    programs = {f"{peer}, ranks {ranks}": (peer, ranks) for ranks in RANKS for peer in PEERS}
    samples = interleave(
        {
            name: functools.partial(one_start, on_ranks(workload, ranks), PEERS[peer])
            for name, (peer, ranks) in programs.items()
        },
        rounds,
    )
    of_program = {name: [one for one in samples if one.variant == name] for name in programs}
    return samples, [steps_record(ranks, peer, workload, of_program[name]) for name, (peer, ranks) in programs.items()]


def steps_record(ranks: int, peer: str, workload: Workload, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the table row of a peer: medians of steps, and of the ratios of neighbouring ones."""
    wall = pairs(peer, workload, samples, "theirs", "ours")
    place = {"ranks": ranks, "against": peer}
    if not wall:
        return place | {_RATIO: samples[0].error}
    _, cpu = compare(pairs(peer, workload, samples, "their_cpu", "our_cpu"), peer)
    seconds = pair_record(ranks, compare(wall, peer), ("its step, s, median", "Trainshed's"))
    return place | seconds | {"the same of CPU seconds": cpu.ratio_text}


def pairs(peer: str, workload: Workload, samples: Sequence[Sample], theirs: str, ours: str) -> list[Sample]:
    """Return each counted step of both programs as a sample, of which neighbours have the same number."""
    return [
        Sample(name, one.round * 1000 + number, seconds)
        for name, key in ((peer, theirs), (OURS, ours))
        for one in samples
        if not one.error
        for number, seconds in enumerate(one.raw[key][workload.first_counted : -1])
    ]


def memory(workload: Workload, rounds: int) -> Found:
    """Compare the peak of a rank with the plan."""
    found = [peak(on_ranks(workload, ranks), number) for number in range(rounds) for ranks in RANKS]
    return found, [memory_record([one for one in found if one["ranks"] == ranks]) for ranks in RANKS]


def peak(workload: Workload, number: int) -> dict[str, Any]:
    """Return the peak bytes of a rank, and those of the plan's terms. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, out = Path(root, "workload"), Path(root, "peak.json")
        short = workload.model_copy(update={"steps": 2})
        short.write(folder)
        spec = short.spec(folder)
        arguments, log = loop_arguments(spec, Path(root, "run"))
        module = "benchmarks.training.peak_memory.peak_run"
        run_module(module, out, *arguments, log=log, ranks=workload.world, variables=ALLOCATOR)
        found: dict[str, int] = json.loads(out.read_bytes())
        job = parse_spec(spec)
        shape, _ = check_model(job, ReadPolicy(project="default", roots=()))
    assert shape is not None
    terms = {term.name: term.bytes for term in plan_job(job, shape).memory}
    return {"ranks": workload.world, "round": number, "terms": terms} | found


def memory_record(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table row of a number of ranks: the smallest peak of all rounds, and its ratios."""
    terms, measured = samples[0]["terms"], min(one["held_bytes"] + one["peak_bytes"] for one in samples)
    least = sum(terms.get(name, 0) for name in (*_STATE, *_FORWARD))
    gathered = terms["gathered_parameters"]
    return {
        "ranks": samples[0]["ranks"],
        "peak of a rank, MiB": f"{measured / 2**20:.1f}",
        "÷ (frozen ÷ ranks + 16 B x adapters ÷ ranks + forward)": f"{measured / least:.3f}",
        "÷ the same + gathered weights": f"{measured / (least + gathered):.3f}",
    }


def saves(workload: Workload, rounds: int) -> Found:
    """Compare checkpoints with those of a run that trains all weights."""
    kinds = {FULL: workload.model_copy(update={"lora": None}), ADAPTERS: workload}
    samples = interleave({name: functools.partial(saved, one) for name, one in kinds.items()}, rounds)
    return samples, saves_records(samples)


def saved(workload: Workload) -> Measured:
    """Return the median seconds from the copy of a checkpoint to its commit, and its bytes. Raises ProgramError."""
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-") as root:
        folder, run_dir = Path(root, "workload"), Path(root, "run")
        workload.write(folder)
        checkpoint = {"every_steps": SAVE_EVERY, "keep_last": 1}
        lines = run_loop(workload.spec(folder, checkpoint=checkpoint), run_dir, ranks=workload.world)
        commits = [one for one in gpu.events(run_dir) if one["event"] == "checkpoint_committed"]
    waits = [line["checkpoint_blocked_seconds"] for line in lines if line["checkpoint_blocked_seconds"]]
    seconds = [one["seconds"] for one in commits]
    return Measured(float(np.median(seconds)), {"bytes": commits[0]["bytes"], "seconds": seconds, "waits": waits})


def saves_records(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the table rows of checkpoints with all weights and with adapters; ratios are those of the same step."""
    by_save = {
        name: [
            Sample(one.variant, one.round * 1000 + number, seconds, one.error)
            for one in samples
            for number, seconds in enumerate(one.raw.get(name, [None]))
        ]
        for name in ("seconds", "waits")
    }
    waits = {row.variant: seconds_text(row) for row in compare(by_save["waits"], FULL)}
    sizes = {one.variant: f"{one.raw['bytes'] / 1e6:.2f}" for one in samples if not one.error}
    return [
        {
            "checkpoints of": row.variant,
            "MB": sizes.get(row.variant),
            "s to the commit, median": seconds_text(row),
            _RATIO: row.ratio_text,
            "training waits, s, median": waits[row.variant],
        }
        for row in compare(by_save["seconds"], FULL)
    ]


def on_gpu(_: Workload, __: int) -> Found:
    """Measure the case of a GPU; its row has the reason if it cannot run here."""
    found = gpu.measured("speed", GPU_CASE, None, 540)
    return [found], [{"goal, tokens/s a GPU": GPU_GOAL} | {key: one for key, one in found.items() if key != "raw"}]


PARTS: dict[str, Callable[[Workload, int], Found]] = {
    "steps": steps,
    "memory": memory,
    "saves": saves,
    "gpu": on_gpu,
}

if __name__ == "__main__":
    main()
