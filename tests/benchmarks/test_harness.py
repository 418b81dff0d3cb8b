"""The benchmark harness on known numbers."""

import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from benchmarks.data.data_wait import wait_share
from benchmarks.data.streams import rate
from benchmarks.data.two_places import in_turn
from benchmarks.faults import false_alarms
from benchmarks.harness import (
    Measured,
    Sample,
    bootstrap_interval,
    compare,
    failures,
    interleave,
    markdown_table,
    ratio_table,
    ratios_of,
    taken,
    write_result,
)
from benchmarks.launch import ProgramError
from benchmarks.training import experts, tensor
from benchmarks.training.gpu import lacking, stall, window_seconds
from benchmarks.training.gpu_cases import CASES
from benchmarks.training.trace import Trace, check_sharded, measure
from benchmarks.training.ulysses import exchange_share
from benchmarks.workload import Workload
from train_loop.spec import parse


def test_every_round_runs_each_program_once_in_a_rotating_order() -> None:
    ran: list[str] = []

    def program(name: str) -> Callable[[], Measured]:
        def run() -> Measured:
            ran.append(name)
            return Measured(1.0)

        return run

    interleave({name: program(name) for name in "abc"}, 3, say=lambda _: None)
    assert ran == [*"abc", *"bca", *"cab"]


def test_failing_program_keeps_its_row_and_is_not_retried() -> None:
    tries = itertools.count()

    def broken() -> Measured:
        next(tries)
        raise ProgramError("it needs a GPU")

    samples = interleave({"bare": lambda: Measured(2.0), "peer": broken}, 3, say=lambda _: None)
    assert next(tries) == 1
    assert "| peer | – | it needs a GPU |" in ratio_table(compare(samples, "bare"), what="seconds", baseline="bare")


def test_program_that_failed_once_keeps_its_figures_and_reports_the_failure() -> None:
    samples = [Sample("bare", 0, 1.0), Sample("bare", 1, 1.0), Sample("ours", 0, 1.5), Sample("ours", 1, None, "a | b")]
    table = ratio_table(compare(samples, "bare"), what="seconds", baseline="bare")
    assert "| ours | 1.5000 | 1.500 [1.500, 1.500]; a / b |" in table


def test_ratios_are_computed_within_a_round() -> None:
    # The machine was ten times slower in the second round, and the ratio of the programs was unchanged.
    values = {"bare": [1.0, 10.0, 2.0], "ours": [1.1, 11.0, 2.2]}
    samples = [Sample(name, number, value) for name, found in values.items() for number, value in enumerate(found)]
    bare, ours = compare(samples, "bare")
    assert (bare.ratio, bare.low, bare.high) == (1.0, 1.0, 1.0)
    assert ours.median == 2.2
    assert (ours.ratio, ours.low, ours.high) == pytest.approx((1.1, 1.1, 1.1))


def test_round_without_a_baseline_gives_no_ratio() -> None:
    (row,) = compare([Sample("ours", 0, 1.0)], "bare")
    assert row.ratio is None


def test_median_interval_has_its_stated_coverage() -> None:
    draw = np.random.default_rng(7)
    intervals = [bootstrap_interval(draw.normal(1.0, 0.1, 15).tolist(), draws=500) for _ in range(300)]
    assert 0.90 < np.mean([low <= 1.0 <= high for low, high in intervals]) <= 1.0


def test_missing_value_of_a_record_is_a_dash() -> None:
    assert markdown_table([{"case": "a", "MFU": "40%"}, {"case": "b"}]).splitlines()[2:] == ["| a | 40% |", "| b | – |"]


def test_results_keep_raw_data_machine_and_versions(tmp_path: Path) -> None:
    sample = Sample("bare", 0, 1.5, raw={"ends": [1.0, 2.5]})
    file = write_result("some", settings={"steps": 2}, data=[sample], table="| a |", folder=tmp_path)
    found = json.loads(file.read_text())
    assert found["data"][0]["raw"] == {"ends": [1.0, 2.5]}
    assert found["machine"]["versions"]["torch"]
    assert found["machine"]["cores"] >= 1
    assert found["date"][:10] in file.name
    assert (tmp_path / "some.md").read_text().startswith("| a |\n\n")


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (None, False),
        ("peer exited with code 1: ModuleNotFoundError: No module named 'lightning'", False),
        ("ours exited with code 1: ModuleNotFoundError: No module named 'torch'", True),
        ("the ranks have started 2 times; expected 1", True),
    ],
)
def test_benchmark_fails_if_an_installed_program_does(tmp_path: Path, error: str | None, fails: bool) -> None:
    data = [Sample("fine", 0, 1.0), Sample("other", 0, None, error)]
    expected: AbstractContextManager[object] = pytest.raises(SystemExit, match="x: other: ") if fails else nullcontext()
    with expected:
        write_result("x", settings={}, data=data, table="", folder=tmp_path)
    assert (tmp_path / "x.md").exists()
    assert failures([{"sample": {"variant": "other", "error": error}}]) == ([f"other: {error}"] if fails else [])


def test_seconds_per_step_are_those_of_the_window_after_warm_up() -> None:
    assert Trace(ends=[0.0, 9.0, 10.0, 11.0, 13.0], losses=[1.0] * 5).step_seconds(2) == pytest.approx(4 / 3)


def test_program_with_other_losses_is_not_compared(tmp_path: Path) -> None:
    workload = Workload(steps=2, first_counted=1)
    measure(Trace(ends=[1.0, 2.0], losses=[5.0, 4.0]), workload, tmp_path / "first.json")
    with pytest.raises(ProgramError, match=r"differ from the baseline's by up to 2\.5e-01"):
        measure(Trace(ends=[1.0, 2.0], losses=[5.0, 3.0]), workload, tmp_path / "first.json")


def test_program_that_does_not_shard_is_not_compared() -> None:
    with pytest.raises(RuntimeError, match="trains without FSDP2: weight and 1 other"):
        check_sharded(nn.Linear(2, 2))


def test_save_cost_is_the_extra_time_of_its_window() -> None:
    # Steps of one second; the save of step 2 slows steps 3 and 4 by half a second each, and commits within step 4.
    ends = {1: 1.0, 2: 2.0, 3: 3.5, 4: 5.0, 5: 6.0}
    lines = [{"step": step, "time": at} for step, at in ends.items()]
    cost = stall(lines, {"step": 2, "time": 4.2}, plain=window_seconds(lines, 1, 2))
    assert cost == {"step": 2, "steps": 2, "lost": pytest.approx(1.0), "durable_after": pytest.approx(2.2)}
    assert stall(lines, {"step": 4, "time": 7.0}, plain=1.0) is None


def test_all_to_all_share_counts_the_window_only(tmp_path: Path) -> None:
    trace = Trace(ends=[10.0, 20.0, 30.0], losses=[1.0] * 3)
    (tmp_path / "exchanges.0").write_text(json.dumps([[5.0, 3.0], [15.0, 2.0], [25.0, 2.0]]))
    (tmp_path / "exchanges.1").write_text(json.dumps([[15.0, 1.0], [25.0, 1.0]]))
    assert exchange_share(trace, 1, list(tmp_path.glob("exchanges.*"))) == pytest.approx(0.15)


def test_variant_is_compared_with_each_other_that_ran() -> None:
    samples = [Sample("ours", 0, 3.0), Sample("a", 0, 2.0), Sample("b", 0, None, "it needs a GPU")]
    assert ratios_of("ours", samples) == {"a": "1.500 [1.500, 1.500]"}


def test_different_number_of_the_same_samples_can_be_compared() -> None:
    samples = [Sample("a", 0, 1.0, raw={"first": 4.0}), Sample("b", 0, 1.0)]
    assert [sample.value for sample in taken(samples, "first")] == [4.0, None]


def test_positions_are_opened_in_turn_and_the_first_opening_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.data.two_places.sleep", lambda _: None)
    opened: list[int] = []

    def seconds_at(place: int) -> float:
        opened.append(place)
        return float(place)

    found = in_turn(seconds_at, 1, 9, pairs=2)
    assert opened == [0, 1, 9, 9, 1]
    assert (found["early"], found["late"]) == (1.0, 9.0)


def test_wait_share_is_that_of_all_steps_together() -> None:
    steps = [{"step_seconds": 1.0, "data_wait_seconds": 0.5}, {"step_seconds": 9.0, "data_wait_seconds": 0.5}]
    assert wait_share(steps) == pytest.approx(0.1)


def test_stream_that_stops_early_has_no_rate() -> None:
    assert rate([4] * 10, of=40) > 0
    with pytest.raises(AssertionError, match="delivered 36 rows; expected 40"):
        rate([4] * 9, of=40)


def test_alarm_without_a_cause_is_false() -> None:
    done: list[dict[str, Any]] = [
        {"what": "frozen", "host": "node1", "time": 100.0, "end": 105.0},
        {"what": "cut", "host": "node2", "time": 300.0, "end": 330.0, "lost": 311.0},
    ]
    alarms: list[dict[str, Any]] = [
        {"event": "host_silent", "host": "node1", "time": 105.5},
        {"event": "host_silent", "host": "node2", "time": 104.0},
        {"event": "host_silent", "host": "node2", "time": 305.0},
        {"event": "host_silent", "host": "node2", "time": 250.0},
        {"event": "workers_lost", "hosts": ["node1"], "time": 104.0},
        {"event": "workers_lost", "hosts": ["node2"], "time": 311.0},
        {"event": "storage_unavailable", "hosts": ["node2"], "time": 311.0},
    ]
    table = false_alarms.table(60, done, alarms, steps=7, groups=3)
    rows = table.splitlines()
    assert "| `host_silent` with a cause, without | 2, 2 |" in rows
    assert "| `workers_lost` with a cause, without | 1, 1 |" in rows
    assert "| `storage_unavailable` with a cause, without | 0, 1 |" in rows
    assert "| worker groups, expected | 3, 2 |" in rows
    assert "| seconds from a cut to its report, median, least to most | 11.0, 11.0 to 11.0 |" in rows


@pytest.mark.parametrize("name", CASES)
def test_case_of_gpus_is_a_valid_spec(name: str) -> None:
    case = CASES[name]
    assert parse(case.spec("file:///tokens.parquet")).scaling.num_workers == case.ranks
    assert lacking(case, 8) is None
    assert lacking(case, 0) == (None if case.on_cpu else f"needs {case.ranks} GPUs, and this machine has 0")


def test_bytes_of_experts_are_those_of_the_formulas() -> None:
    two, four = (experts.MESHES[4][mesh] for mesh in ("fsdp 4, ep 2", "fsdp 4, ep 4"))
    # 4 layers, 512 tokens, 4 experts of each, 256 numbers of 4 bytes, there and back, forward and backward.
    assert experts.exchanged(two) == 4 * 512 * 4 * 256 * 4 * 4 / 2
    assert experts.exchanged(four) == 4 * 512 * 4 * 256 * 4 * 4 * 3 / 4
    # 16 of 32 experts, three matrices of 256 x 256, two gathers and a reduce-scatter of half of them.
    assert experts.sharded(two) == 4 * 16 * 3 * 256 * 256 * 4 * 3 / 2
    assert experts.sharded(four) == 0


def test_measured_bytes_of_experts_are_those_beyond_a_mesh_without_their_shards() -> None:
    counts = {
        "fsdp 2": [{"bytes": {"all-gather": 70, "reduce-scatter": 30}, "rows": [8, 8]}] * 2,
        "fsdp 2, ep 2": [
            {"bytes": {"all-gather": 20, "reduce-scatter": 10}, "rows": rows} for rows in ([12, 4], [4, 12])
        ],
    }
    workload = experts.MESHES[2]["fsdp 2"]
    assert experts.expert_gathers(workload, counts["fsdp 2"], counts) == 70
    assert experts.slowest(counts["fsdp 2"]) == 1
    assert experts.slowest(counts["fsdp 2, ep 2"]) == 1.5, "ranks wait for each other in each layer"


def test_bytes_of_shared_layers_are_those_of_the_formula() -> None:
    # Two sequences of 512 tokens: (4 layers x 4 + 2) sums of 256 numbers of 4 bytes, sent twice by half.
    assert tensor.summed(tensor.MESHES[2]["tp 2"]) == 18 * 1024 * 256 * 4
    assert tensor.summed(tensor.MESHES[2]["fsdp 2"]) == 0
