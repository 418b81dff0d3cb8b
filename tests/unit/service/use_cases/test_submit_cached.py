"""A spec that is submitted again: one plan for an unchanged cluster, and a check of the role each time."""

from pathlib import Path

import pytest

from service.domain.access.roles import OPERATOR, Principal, Role
from service.errors import Forbidden, InvalidSpec
from service.use_cases.jobs import specs
from service.use_cases.jobs.planning import CheckedSpec, Planner
from service.use_cases.jobs.specs import SMALL, parse_spec
from service.use_cases.jobs.submit import JobRequest, Submitter
from tests.support.fakes.service import FakeService, spec_body
from train_loop.spec import AnyJobSpec


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the specs whose plans were computed."""
    computed, checked = list[str](), Planner._checked

    def note(planner: Planner, spec: AnyJobSpec, *rest: object) -> CheckedSpec:
        computed.append(spec.name)
        return checked(planner, spec, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "_checked", note)
    return computed


def submit(submitter: Submitter, body: bytes) -> tuple[str, ...] | None:
    """Submit a spec whose checks are cached. Return its warnings; None if it is left out."""
    request = JobRequest(OPERATOR, body)
    found = submitter.submit_cached([request]).get(request)
    return None if found is None else found.view.warnings


def test_unchanged_spec_on_an_unchanged_cluster_is_planned_once(service: FakeService, planned: list[str]) -> None:
    submitter, body = service.submitter, spec_body().encode()
    assert submit(submitter, body) is None, "expected no result of a check yet"
    submitter.submit(JobRequest(OPERATOR, body))
    planned.clear()
    assert [submit(submitter, body) for _ in range(3)] == [()] * 3
    assert len(planned) == 1


def test_changed_cluster_is_planned_again(service: FakeService, planned: list[str]) -> None:
    submitter, body = service.submitter, spec_body().encode()
    submitter.submit(JobRequest(OPERATOR, body))
    submit(submitter, body)
    planned.clear()
    service.cluster.memory = 1
    assert submit(submitter, body) is None, "expected a refusal: the model does not fit"
    assert len(planned) == 1
    service.cluster.memory = 1 << 50
    assert submit(submitter, body) == ()
    service.cluster.total = {"CPU": 2.0}
    with pytest.raises(InvalidSpec, match="Ray Data needs"):
        submitter.submit(JobRequest(OPERATOR, body))
    assert submit(submitter, body) is None


def test_new_result_of_the_check_is_planned_again(service: FakeService, planned: list[str]) -> None:
    submitter, body = service.submitter, spec_body().encode()
    submitter.submit(JobRequest(OPERATOR, body))
    submit(submitter, body)
    service.preflight.notes = ("64 rows are dropped",)
    planned.clear()
    service.preflight.check(parse_spec(body, lambda _: None))
    assert submit(submitter, body) == ("64 rows are dropped",)
    assert len(planned) == 1


def test_role_of_a_known_body_is_asked_each_time(service: FakeService) -> None:
    submitter, body = service.submitter, spec_body(project="alpha").encode()
    submitter.submit(JobRequest(OPERATOR, body))
    request = JobRequest(Principal("key-1", "someone", roles={"beta": Role.EDITOR}), body)
    assert submitter.submit_cached([request]) == {}
    with pytest.raises(Forbidden):
        submitter.submit(request)


def test_known_body_gives_the_same_spec_and_a_large_or_invalid_one_is_not_kept() -> None:
    body = spec_body(name="kept").encode()
    asked = list[str]()
    assert parse_spec(body, asked.append) is parse_spec(body, asked.append)
    assert asked == ["default", "default"]
    large = body + b" " * SMALL
    assert parse_spec(large, asked.append) == parse_spec(body, asked.append)
    assert specs._parsed.get(large) is None
    wrong = spec_body(name="WRONG").encode()
    for _ in range(2):
        with pytest.raises(InvalidSpec, match="name"):
            parse_spec(wrong, asked.append)
