"""Models of the client: names of enumerated values are read as their members."""

import json
from typing import Any, get_args

import pytest

from service.api.schemas.common import RoleName, StateName
from trainshed.job_base import states_of
from trainshed.models import CloneIn, JobState, KeyIn, Role, WebhookIn


@pytest.mark.parametrize(("names", "members"), [(RoleName, Role), (StateName, JobState)])
def test_types_of_names_list_all_members(names: Any, members: Any) -> None:
    enum, literals = get_args(get_args(names)[0])
    assert (enum, get_args(literals)) == (members, tuple(members))


def test_names_are_read_as_members_and_sent_as_names() -> None:
    key = KeyIn(name="ci", roles={"nlp": "editor", "*": Role.VIEWER})
    assert all(type(role) is Role for role in key.roles.values())
    assert json.loads(key.model_dump_json())["roles"] == {"nlp": "editor", "*": "viewer"}
    webhook = WebhookIn(project="*", url="https://example.com", states=["FAILED", JobState.PAUSED])
    assert all(type(state) is JobState for state in webhook.states)
    assert json.loads(webhook.model_dump_json())["states"] == ["FAILED", "PAUSED"]
    assert CloneIn(overrides={"training": {"max_steps": 3}}).overrides == {"training": {"max_steps": 3}}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [(KeyIn, {"name": "ci", "roles": {"nlp": "owner"}}), (WebhookIn, {"project": "*", "url": "x", "states": ["DONE"]})],
)
def test_other_names_are_refused(kind: Any, fields: Any) -> None:
    with pytest.raises(ValueError, match=r"Input should be 'viewer'|Input should be 'QUEUED'"):
        kind(**fields)


def test_one_state_is_not_read_as_its_letters() -> None:
    assert states_of("RUNNING") == states_of([JobState.RUNNING]) == (JobState.RUNNING,)
    with pytest.raises(ValueError, match=r"^invalid state 'DONE'; expected QUEUED, STARTING, "):
        states_of("DONE")  # type: ignore[arg-type]
