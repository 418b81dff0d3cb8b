"""Sentences for Ray's reports of dead actors."""

import pytest

from train_loop.faults.ray_reports import describe_death, shorten_report

RAYS_DEATH = """\
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tpid: 28100
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: """


@pytest.mark.parametrize(
    ("report", "end"),
    [
        (
            f"{RAYS_DEATH}Worker exits unexpectedly by a signal. Exit code: 1. The process receives a SIGTERM.",
            "was terminated by signal 15 (SIGTERM)",
        ),
        (
            f"{RAYS_DEATH}Worker unexpectedly exits with a connection error code 2. Some common causes include: x",
            "died: its worker process has died",
        ),
        ("ray.exceptions.ActorUnavailableError: The actor is unavailable: x", "died: The actor is unavailable: x"),
        ("ray.exceptions.OutOfMemoryError: Task was killed.\nx", "died: Task was killed."),
    ],
)
def test_death_reported_by_ray_is_described_without_its_advice(report: str, end: str) -> None:
    assert describe_death(report) == end


def test_report_of_a_dead_actor_becomes_one_sentence() -> None:
    report = RAYS_DEATH.replace("RayTrainWorker", "TrainController") + "Worker unexpectedly exits"
    assert shorten_report(report) == "Ray's actor TrainController died: its worker process has died"
    assert shorten_report("RuntimeError: a\nb") == "RuntimeError: a\nb"
