"""TensorBoard files of a run, read with TensorBoard's own reader."""

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.builders.sinks import a_run, as_logged, log_steps, shown
from tests.support.servers.s3 import s3_server
from tests.support.waiting import wait_for
from train_loop.run_dir import RunDir, read_place
from train_loop.sinks.cursor import SinkCursor
from train_loop.sinks.registry import open_sink


def handover(run_dir: RunDir, *, attempt: int | None = None) -> SinkCursor:
    return SinkCursor(run_dir, "tensorboard", partial(open_sink, "tensorboard", run_dir), attempt=attempt)


def hand_over(run_dir: RunDir) -> None:
    """Forward all new lines with a new forwarder."""
    newcomer = handover(run_dir)
    newcomer.hand_over()
    newcomer.close(None)


def test_numbers_of_every_step_are_written_with_their_time(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, range(1, 51))
    hand_over(run_dir)
    events = EventAccumulator(str(run_dir.tensorboard))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss", "eval/loss"], "expected only numbers"
    assert shown(run_dir.tensorboard) == as_logged(range(1, 51))
    assert [event.wall_time for event in events.Scalars("eval/loss")] == [1000.0 + step for step in range(1, 51)]


def test_repeated_steps_are_shown_once_with_their_last_values(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, range(1, 11))
    ours = handover(run_dir)
    ours.hand_over()
    log_steps(run_dir, range(6, 9), extra=0.5)
    ours.hand_over()
    assert shown(run_dir.tensorboard) == as_logged(range(1, 6)) + as_logged(range(6, 9), extra=0.5)
    ours.close(None)
    log_steps(run_dir, range(4, 7), attempt=2, extra=0.25)
    hand_over(run_dir)
    assert shown(run_dir.tensorboard) == as_logged(range(1, 4)) + as_logged(range(4, 7), extra=0.25)


def test_new_forwarder_resumes_or_restarts_without_an_offset(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, range(1, 5))
    hand_over(run_dir)
    hand_over(run_dir)
    assert len(list(run_dir.tensorboard.iterdir())) == 1, "expected no new file"
    log_steps(run_dir, range(5, 9))
    hand_over(run_dir)
    run_dir.sink_file("tensorboard").write_text("torn")
    hand_over(run_dir)
    assert len(list(run_dir.tensorboard.iterdir())) == 3
    assert shown(run_dir.tensorboard) == as_logged(range(1, 9))


@pytest.mark.parametrize("seen", [1, 40, 400])
def test_killed_forwarder_loses_and_repeats_nothing(tmp_path: Path, seen: int) -> None:
    run_dir = a_run(tmp_path, range(1, 3))
    command = [sys.executable, "-m", "train_loop.sinks", str(tmp_path), "--sink", "tensorboard", "--follow"]
    victim = subprocess.Popen(command)
    try:
        for start in range(3, 1000, 100):
            log_steps(run_dir, range(start, start + 100))
            if read_place(run_dir.sink_file("tensorboard")).offset > 100 * seen:
                break
        wait_for(lambda: read_place(run_dir.sink_file("tensorboard")).offset > 100 * seen, "some of it", seconds=60)
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    log_steps(run_dir, range(start + 100, start + 150))
    hand_over(run_dir)
    assert shown(run_dir.tensorboard) == as_logged(range(1, start + 150))


def test_kill_between_flush_and_offset_hides_the_repeated_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = a_run(tmp_path, range(1, 11))
    victim = handover(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr("train_loop.sinks.cursor.write_place", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            victim.hand_over()
    assert shown(run_dir.tensorboard) == as_logged(range(1, 11)), "expected the forwarded steps on disk"
    log_steps(run_dir, [11])
    hand_over(run_dir)
    assert shown(run_dir.tensorboard) == as_logged(range(1, 12))
    victim.drop()


def test_object_storage_files_are_uploaded_and_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train_loop.sinks.tensorboard._ROLL_BYTES", 2000)
    with s3_server() as server, monkeypatch.context() as patch:
        server.bucket("runs")
        for name, value in server.environment().items():
            patch.setenv(name, value)
        run_dir = RunDir.at("s3://runs/default/job-1")
        ours = handover(run_dir)
        for start in range(1, 101, 20):
            log_steps(run_dir, range(start, start + 20))
            ours.hand_over()
        ours.close(None)
        log_steps(run_dir, range(91, 111), attempt=2, extra=0.5)
        hand_over(run_dir)
        copied = tmp_path / "copied"
        copied.mkdir()
        for file in run_dir.tensorboard.iterdir():
            (copied / file.name).write_bytes(file.read_bytes())
    assert shown(copied) == as_logged(range(1, 91)) + as_logged(range(91, 111), extra=0.5)
    assert len(list(copied.iterdir())) > 2
    assert all(file.stat().st_size < 5000 for file in copied.iterdir())
