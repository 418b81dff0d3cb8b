"""Every benchmark at toy size, with programs that do the same training."""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoints import commits, reshard, reshard_run, saves, saves_run
from benchmarks.control_plane import accepts, first_step, full_queue, open_streams
from benchmarks.data import data_wait, prepare, resume
from benchmarks.faults import recover
from benchmarks.inference import rows
from benchmarks.training import adapters, experts, gpu, ordered, step_overhead, tensor, turns, ulysses
from benchmarks.training.peak_memory import ends, options, recompute
from benchmarks.workload import TOY

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a benchmark's command line and return the result that it wrote."""

    def call(main: Callable[[], None], *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--results", str(tmp_path)])
        main()
        (file,) = tmp_path.glob("*.json")
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    return call


def agreed(result: dict[str, Any]) -> set[str]:
    """Return the programs that ran and had the baseline's losses."""
    for sample in result["data"]:
        assert sample["error"] is None, sample
        assert sample["raw"]["loss_difference"] < 1e-5
    return {sample["variant"] for sample in result["data"]}


def needs(package: str) -> None:
    # Adapters bring accelerate, but no other package of the extra `bench`.
    if find_spec(package) is None or find_spec("lightning") is None:
        pytest.skip(f"{package} is not installed: make test-bench installs it, and runs this test")


def needs_time() -> None:
    """Skip a test where no benchmarks are run: it starts processes that train, and takes 5 to 40 s."""
    if find_spec("lightning") is None:
        pytest.skip("needs the extra `bench`: make test-bench runs it")


def test_bare_loop_and_trainshed_train_the_same(run: Run) -> None:
    needs_time()
    result = run(step_overhead.main, "--quick", "--only", step_overhead.OURS)
    assert agreed(result) == {step_overhead.BARE, step_overhead.OURS}


def test_ray_around_the_bare_loop_and_a_service_job_train_the_same(run: Run) -> None:
    needs_time()
    result = run(step_overhead.main, "--quick", "--only", step_overhead.RAY, step_overhead.SERVICE)
    assert agreed(result) == {step_overhead.BARE, step_overhead.RAY, step_overhead.SERVICE}


def test_fabric_trains_the_same(run: Run) -> None:
    needs("lightning")
    assert len(agreed(run(step_overhead.main, "--quick", "--only", "Lightning"))) == 2


def test_hugging_face_trains_the_same(run: Run) -> None:
    needs("accelerate")
    assert len(agreed(run(step_overhead.main, "--quick", "--only", "Hugging Face"))) == 2


def test_both_loops_alternate_in_the_same_ranks(run: Run) -> None:
    needs_time()
    result = run(turns.main, "--quick")
    assert agreed(result) == {turns.BARE, turns.OURS}
    assert [sample["raw"]["ranks"] for sample in result["data"]] == [1, 1, 2, 2]


def test_adapters_are_compared_with_peft_in_the_same_ranks(run: Run) -> None:
    needs_time()
    result = run(adapters.main, "--quick", "--only", "steps")
    assert [(one["error"], one["raw"]["loss_difference"] < 1e-5) for one in result["data"]] == [(None, True)] * 4


def test_adapters_have_peaks_of_each_number_of_ranks(run: Run) -> None:
    needs_time()
    result = run(adapters.main, "--quick", "--only", "memory")
    assert [one["ranks"] for one in result["data"]] == [1, 2]
    assert all(one["held_bytes"] >= one["terms"]["frozen_parameters"] for one in result["data"])


def test_checkpoints_of_adapters_are_smaller_than_those_of_all_weights(run: Run) -> None:
    needs_time()
    result = run(adapters.main, "--quick", "--only", "saves")
    sizes = {one["variant"]: one["raw"]["bytes"] for one in result["data"]}
    assert sizes[adapters.ADAPTERS] < sizes[adapters.FULL]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the case")
def test_case_of_adapters_on_a_gpu_is_skipped_with_the_reason(run: Run) -> None:
    assert "needs 1 GPUs, and this machine has 0" in run(adapters.main, "--only", "gpu")["table"]


def test_any_size_has_a_ratio_on_each_number_of_ranks(run: Run) -> None:
    needs_time()
    result = run(ordered.main, "--quick", "--rounds", "1")
    assert [sample["raw"]["ranks"] for sample in result["data"]] == [1, 1, 2, 2, 4, 4]
    assert {sample["variant"] for sample in result["data"]} == {ordered.DEFAULT, ordered.ORDERED}
    assert all(sample["value"] > 0 for sample in result["data"])


def test_ulysses_trains_the_same_and_reports_its_share(run: Run) -> None:
    needs_time()
    result = run(ulysses.main, "--quick")
    assert agreed(result) == set(ulysses.VARIANTS)
    shares = {sample["variant"]: sample["raw"]["all_to_all_share"] for sample in result["data"]}
    assert shares.pop(ulysses.BASELINE) == 0
    assert all(0 < share < 1 for share in shares.values())


@pytest.mark.parametrize(("main", "meshes"), [(experts.main, experts.MESHES), (tensor.main, tensor.MESHES)])
def test_transformers_own_plans_train_the_same(run: Run, main: Callable[[], None], meshes: dict[int, Any]) -> None:
    needs_time()
    result = run(main, "--quick")
    assert agreed(result) == set(meshes[2])
    for sample in result["data"]:
        ranks = [rank[loop] for rank in sample["raw"]["traffic"] for loop in ("theirs", "ours")]
        assert len(ranks) == 4
        assert all(rank["bytes"] for rank in ranks)


def test_all_programs_make_the_same_number_of_tokens_of_a_corpus(run: Run) -> None:
    needs("datasets")
    result = run(prepare.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    assert len({sample["raw"]["tokens"] for sample in result["data"]}) == 1
    assert {sample["variant"] for sample in result["data"]} == {prepare.OURS, prepare.LOOP, prepare.DATASETS}


def test_every_resume_method_opens_at_both_positions(run: Run) -> None:
    needs("datasets")
    needs("accelerate")
    result = run(resume.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    assert {sample["variant"] for sample in result["data"]} == set(resume.PROGRAMS)


def test_data_waits_are_reported_for_both_models_and_rows_of_every_reader(run: Run) -> None:
    needs("datasets")
    result = run(data_wait.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    values = {sample["variant"]: sample["value"] for sample in result["data"]}
    assert values.keys() == data_wait.JOBS.keys() | data_wait.DRAINS.keys()
    assert all(0 < values[job] < 1 for job in data_wait.JOBS)


def test_every_save_method_adds_time(run: Run) -> None:
    needs("accelerate")
    needs("lightning")
    result = run(saves.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    assert {sample["variant"] for sample in result["data"]} == {*saves_run.WAYS, *saves.PEERS}


def test_every_save_method_has_a_speed(run: Run) -> None:
    needs_time()
    result = run(commits.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    assert all(sample["value"] > 0 for sample in result["data"])


def test_checkpoint_is_loaded_plainly_and_by_a_resume(run: Run) -> None:
    needs_time()
    result = run(reshard.main, "--quick")
    found = [one["sample"] for one in result["data"]]
    assert [sample["variant"] for sample in found] == [*reshard_run.WAYS] * len(reshard_run.PLACES)
    assert all(min(sample["raw"]["seconds"]) > 0 for sample in found)
    assert {len(sample["raw"]["seconds"]) for sample in found} == {reshard.TURNS}


def test_every_program_resumes_after_a_kill(run: Run) -> None:
    needs_time()
    result = run(recover.main, "--quick")
    assert not [sample["error"] for sample in result["data"] if sample["error"]]
    for sample in result["data"]:
        assert sum(sample["raw"][part] or 0 for part in recover.PARTS) == pytest.approx(sample["value"])


def test_memory_has_a_row_for_every_method(run: Run) -> None:
    needs_time()
    result = run(options.main, "--quick")
    found = {one["way"]: one for one in result["data"]}
    assert found["plain"]["peak_bytes"] > 0
    assert all(one["peak_bytes"] or one["error"] for one in found.values())
    assert all(f"| {way} |" in result["table"] for way in options.WAYS)


def test_ends_have_a_row_for_every_way_of_both_models(run: Run) -> None:
    needs_time()
    result = run(ends.main, "--quick")
    assert {(one["raw"]["model"], one["variant"]) for one in result["data"]} == {
        *(("untied", way) for way in ends.UNITS),
        *(("tied", way) for way in ends.TIED),
    }


def test_each_kind_of_recomputation_has_a_peak_and_an_estimate(run: Run) -> None:
    needs_time()
    result = run(recompute.main, "--quick")
    assert [one["kind"] for one in result["data"]] == [*recompute.KINDS]
    assert all(one["peak_bytes"] >= 0 and one["planned_bytes"] > 0 for one in result["data"])


def test_method_rejected_by_the_spec_is_reported_with_its_message() -> None:
    found = options.measure(TOY, options.PLAIN | {"gradient_checkpointing": "sometimes"}, 64)
    assert found["peak_bytes"] is None
    assert "/model/gradient_checkpointing" in found["error"]


# The test below measures speed.
@pytest.mark.parametrize("what", ["save", "kill"])
def test_gpu_benchmark_runs_a_toy_on_the_cpu(run: Run, what: str) -> None:
    needs_time()
    (record,) = run(gpu.main, what, "toy")["data"]
    assert "note" not in record
    assert record["raw"]["metrics"]


def test_gpu_benchmark_separates_packed_documents(tmp_path: Path) -> None:
    needs_time()
    whole, packed = (gpu.measured("speed", case, str(tmp_path), 540)["raw"] for case in ("toy", "toy-packed"))
    assert whole["metrics"][0]["tokens"] == packed["metrics"][0]["tokens"] == 128
    assert whole["metrics"][0]["loss"] != packed["metrics"][0]["loss"]


@pytest.mark.parametrize("case", ["toy-ep2", "toy-tp2"])
def test_gpu_benchmark_runs_several_ranks(case: str, tmp_path: Path) -> None:
    needs_time()
    record = gpu.measured("speed", case, str(tmp_path), 540)
    assert record["raw"]["metrics"][0]["tokens"] == record["tokens/step"]
    assert bool(record["busiest expert to the mean"]) == ("ep" in case)


def test_unknown_case_is_rejected_with_the_known_ones(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(gpu.main, "speed", "qwen5")
    assert "qwen3-0.6b-4k" in capsys.readouterr().err


def test_jobs_are_accepted_and_none_is_lost(run: Run) -> None:
    needs_time()
    result = run(accepts.main, "--quick")
    found = {sample["variant"]: sample for sample in result["data"]}
    assert not [sample for sample in found.values() if sample["error"]]
    assert found[accepts.OURS]["raw"]["sent"] > 0
    assert found[accepts.OURS]["raw"]["lost"] == 0


def test_full_queue_is_answered_and_processed(run: Run) -> None:
    needs_time()
    result = run(full_queue.main, "--quick")
    *samples, supervisors = result["data"]
    assert [sample["error"] for sample in samples] == [None] * 2
    assert all(sample["raw"].keys() == full_queue.PARTS.keys() for sample in samples)
    assert supervisors["supervisor_bytes"]


def test_first_steps_are_timed_in_parts(run: Run) -> None:
    needs_time()
    result = run(first_step.main, "--quick")
    assert [sample["error"] for sample in result["data"]] == [None] * 3
    for sample in result["data"]:
        assert sum(sample["raw"].values()) == pytest.approx(sample["value"])


def test_open_streams_receive_lines(run: Run) -> None:
    needs_time()
    result = run(open_streams.main, "--quick")
    assert [sample["error"] for sample in result["data"]] == [None] * 2
    assert all(0 <= sample["raw"]["most_late"] < open_streams.LATE for sample in result["data"])


def test_programs_of_inference_have_the_same_results(run: Run) -> None:
    needs_time()
    result = run(rows.main, "--quick", "--rounds", "1")
    assert [one["error"] for one in result["data"]] == [None] * 6
    assert {one["variant"] for one in result["data"]} == {rows.OURS, rows.LOOP, rows.RAY}
    assert all(0 < one["raw"]["start_seconds"] < 600 for one in result["data"])
    turns = [one["raw"]["turns"] for one in result["data"] if one["variant"] == rows.OURS]
    assert [{name: len(of_one) for name, of_one in one.items()} for one in turns] == [
        dict.fromkeys(("ours", "loop", "sorted"), 2)
    ] * 2
