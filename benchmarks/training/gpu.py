"""Trainshed's loop on the GPUs of a machine: speed and memory of whole models, cost of a save, and recovery time.

`python -m benchmarks.training.gpu speed CASE ...`, `... save CASE`, `... kill CASE`; `--help` lists the cases. It needs
neither Ray nor a network: tokens are random, and weights, too, without `--model`. `train_loop.run` runs under torchrun
in separate processes. A case that needs more GPUs than there are is skipped with the reason. CPUs run the toy cases.
"""

import argparse
import subprocess
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from benchmarks.harness import RESULTS, markdown_table, write_result
from benchmarks.launch import ProgramError, end, last_words, loop_arguments, metrics, run_loop, start_module
from benchmarks.training.gpu_cases import CASES, Case
from benchmarks.workload import write_tokens
from train_loop.data.dataset import Dataset
from train_loop.data.prepare.packing import Sample
from train_loop.data.shards import write_part
from train_loop.run_dir import RunDir, read_lines, write_durably

Record = dict[str, Any]
SAVE_STEPS, SAVE_EVERY = 60, 20
KILL_AFTER = 5
"""Steps before the checkpoint from which the killed run resumes."""
POLL_SECONDS = 0.02


def main() -> None:
    """Run the measurement for each case, and write its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=MEASURES)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seconds", type=float, default=540, help="time limit for a run [%(default)s]")
    parser.add_argument("--model", help="folder of a model with the sizes of the case, instead of random weights")
    parser.add_argument("--folder", help="folder for runs; use a real disk to measure saves")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for results [%(default)s]")
    arguments = parser.parse_args()
    for name in arguments.cases:
        record = measured(arguments.what, name, arguments.folder, arguments.seconds, model=arguments.model)
        # One file per case: a later case may exceed its time limit and end the program.
        write_result(
            f"gpu-{arguments.what}-{name}",
            settings=asdict(CASES[name]) | {"disk": disk(arguments.folder), "model_folder": arguments.model},
            data=[record],
            table=markdown_table([{key: value for key, value in record.items() if key != "raw"}]),
            folder=arguments.results,
        )


def measured(what: str, name: str, folder: str | None, seconds: float, *, model: str | None = None) -> Record:
    """Return the result of one case, with the weights of a model's folder or random ones, or the error."""
    case = CASES[name]
    if model is not None:
        case = replace(case, model=case.model | {"path": model, "config": None})
    if lack := lacking(case, torch.cuda.device_count()):
        return {"case": name, "note": lack}
    with tempfile.TemporaryDirectory(prefix="trainshed-benchmark-", dir=folder) as root:
        try:
            return {"case": name} | MEASURES[what](case, Path(root), seconds)
        except ProgramError as error:
            return {"case": name, "note": str(error)}


def lacking(case: Case, gpus: int) -> str | None:
    """Return the reason why a machine cannot run a case; None if it can."""
    enough = case.on_cpu if gpus == 0 else gpus >= case.ranks
    return None if enough else f"needs {case.ranks} GPUs, and this machine has {gpus}"


def disk(folder: str | None) -> str:
    """Return the file system type of the runs' folder."""
    command = ["stat", "--file-system", "--format=%T", folder or tempfile.gettempdir()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def speed(case: Case, root: Path, seconds: float) -> Record:
    """Measure tokens/s a GPU over the counted steps, with MFU, peak memory of a rank, and the load of experts."""
    lines = run_loop(spec(case, root), root / "run", ranks=case.ranks, seconds=seconds)
    step_seconds = window_seconds(lines, case.first_counted, case.steps)
    per_rank = case.tokens / step_seconds / case.ranks
    stated = event(root / "run", "training_started").get("mfu") or {}
    flops, peak = stated.get("flops_per_token"), stated.get("peak_flops")
    device_bytes = max((line.get("peak_device_bytes") or 0 for line in lines), default=0)
    return {
        "tokens/step": case.tokens,
        "GPUs": case.ranks,
        "tokens/s a GPU": f"{per_rank:,.0f}",
        "MFU": f"{flops * per_rank / peak:.1%}" if flops and peak else None,
        "peak GB": f"{device_bytes / 1e9:.1f}" if device_bytes else None,
        "step, s": f"{step_seconds:.3f}",
        "busiest expert to the mean": experts_load(lines[case.first_counted :]),
        "loss, first → last": f"{lines[0]['loss']:.3f} → {lines[-1]['loss']:.3f}",
        "raw": {"metrics": lines, "mfu": stated},
    }


def experts_load(lines: list[Record]) -> str | None:
    """Return the tokens of the busiest expert over the mean, averaged over layers and steps; None without experts."""
    loads = [load for line in lines for load in line.get("expert_load") or ()]
    return f"{np.mean(loads):.2f}" if loads else None


def save(case: Case, root: Path, seconds: float) -> Record:
    """Measure the seconds that training loses to each save, counted until the save is durable.

    The window runs from the end of the saved step to the end of the first step after the commit. The time of these
    steps without a save is subtracted. The logged blocked time alone would miss work concurrent with the loop.
    """
    long = replace(case, steps=SAVE_STEPS)
    checkpoint = {"every_steps": SAVE_EVERY, "keep_last": 1}
    lines = run_loop(spec(long, root, checkpoint=checkpoint), root / "run", ranks=case.ranks, seconds=seconds)
    plain = window_seconds(lines, case.first_counted, SAVE_EVERY)
    commits = [one for one in events(root / "run") if one["event"] == "checkpoint_committed"]
    stalls = [one for commit in commits if (one := stall(lines, commit, plain)) is not None]
    if not stalls:
        raise ProgramError("no save was durable before the run's last step; give the case more steps")
    return {
        "checkpoint, GB": f"{commits[0]['bytes'] / 1e9:.2f}",
        "durable after, s": f"{np.median([one['durable_after'] for one in stalls]):.2f}",
        "training lost, s": f"{np.median([one['lost'] for one in stalls]):.2f}",
        "steps meanwhile": "; ".join(f"{one['steps']}" for one in stalls),
        "plain step, s": f"{plain:.3f}",
        "raw": {"metrics": lines, "commits": commits, "stalls": stalls},
    }


def stall(lines: list[Record], commit: Record, plain: float) -> Record | None:
    """Return the cost of one save; None if no step ended after its commit."""
    ends = {line["step"]: line["time"] for line in lines}
    after = [step for step, at in ends.items() if step > commit["step"] and at >= commit["time"]]
    if not after:
        return None
    steps, began = min(after) - commit["step"], ends[commit["step"]]
    lost = ends[min(after)] - began - steps * plain
    return {"step": commit["step"], "steps": steps, "lost": lost, "durable_after": commit["time"] - began}


def kill(case: Case, root: Path, seconds: float) -> Record:
    """Measure the seconds from SIGKILL of launcher and rank, restarted at once, to the end of the first new step."""
    checkpoint = {"every_steps": KILL_AFTER, "keep_last": 1}
    endless = spec(replace(case, steps=10_000), root, checkpoint=checkpoint)
    run_dir, deadline = root / "run", time.monotonic() + seconds
    arguments, log = loop_arguments(endless, run_dir)
    process = start_module("train_loop.run", *arguments, log=log, ranks=case.ranks)
    try:
        while not any(one["event"] == "checkpoint_committed" for one in events(run_dir)):
            pause_or_raise(process, log, deadline)
        killed_at = time.time()
        end(process)
        before = metrics(run_dir)
        process = start_module("train_loop.run", *arguments, log=log, ranks=case.ranks)
        while len(lines := metrics(run_dir)) == len(before):
            pause_or_raise(process, log, deadline)
    finally:
        end(process)
    first = lines[len(before)]
    return {
        "SIGKILL to first new step, s": f"{first['time'] - killed_at:.1f}",
        "killed after step": before[-1]["step"],
        "resumed from step": first["step"] - 1,
        "step, s": f"{window_seconds(before, 2, before[-1]['step']):.3f}",
        "raw": {"metrics": lines, "killed_at": killed_at},
    }


def pause_or_raise(process: "subprocess.Popen[bytes]", log: Path, deadline: float) -> None:
    """Wait 20 ms. Raises ProgramError if the process has exited or the deadline has passed."""
    if process.poll() is not None:
        raise ProgramError(f"the run exited with code {process.returncode}: {last_words(log)}")
    if time.monotonic() > deadline:
        raise ProgramError(f"the time limit was exceeded: {last_words(log)}")
    time.sleep(POLL_SECONDS)


def spec(case: Case, root: Path, **parts: Record) -> Record:
    """Return the case's job spec, and write its tokens; a long run reads them repeatedly."""
    data, length = root / "tokens.parquet", case.sequence_length
    rows = case.rows_per_step * min(case.steps, SAVE_STEPS)
    write_tokens(data, rows=rows, length=length, config=case.config, documents=case.documents)
    if case.documents > 1:
        # The dataset that preparation with Ray would have written.
        table = pq.read_table(data)
        columns = (table["ids"].to_pylist(), table["documents"].to_pylist())
        samples = (Sample(np.array(ids, np.int32), None, None, lengths) for ids, lengths in zip(*columns, strict=True))
        (root / "packed").mkdir()
        part = write_part(samples, root / "packed")
        packed = Dataset(fingerprint=part.fingerprint, parts=(part,), sequence_length=length)
        write_durably(RunDir(root / "run").data, packed.model_dump_json())
    return case.spec(data.as_uri(), **parts)


def window_seconds(lines: list[Record], first: int, last: int) -> float:
    """Return the mean wall-clock seconds per step, from the end of step `first` to the end of step `last`."""
    ends = {line["step"]: line["time"] for line in lines}
    return float(ends[last] - ends[first]) / (last - first)


def events(run_dir: Path) -> list[Record]:
    """Return the run's events so far."""
    return list(read_lines(RunDir(run_dir).attempt(1).events))


def event(run_dir: Path, name: str) -> Record:
    """Return the first event with a name."""
    return next(one for one in events(run_dir) if one["event"] == name)


MEASURES = {"speed": speed, "save": save, "kill": kill}

if __name__ == "__main__":
    main()
