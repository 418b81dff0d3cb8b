"""The JSON of a job in an answer, into which the text of its spec is put."""

import json
from pathlib import Path

import pytest

from service.api.convert import job_out
from service.api.schemas import JobOut
from service.domain.jobs import spec_text
from service.domain.jobs.job import Job
from service.domain.jobs.spec_text import spec_json
from tests.support.builders.specs import infer_spec
from tests.support.fakes.service import FakeService, raw_spec
from train_loop.spec import parse_any

SPECS = {
    "training": raw_spec(),
    "names in other scripts": raw_spec(labels={"größe": '"\\ {}', "emoji": "🚂"}),
    "inference": infer_spec(),
}


@pytest.mark.parametrize("name", SPECS)
def test_answer_is_the_json_of_the_model(name: str, tmp_path: Path) -> None:
    job = Job("job-1", parse_any(SPECS[name]), "file:///nowhere", created_at=0.0, updated_at=0.0)
    out = job_out(FakeService(tmp_path).jobs.view(job), now=1.0)
    assert out.to_json(spec_json(job.spec)).decode() == out.model_dump_json()
    assert JobOut.model_validate_json(out.to_json(spec_json(job.spec))) == out
    assert json.loads(spec_json(job.spec)) == job.spec.model_dump(mode="json")


def test_only_texts_of_small_specs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = parse_any(raw_spec()), parse_any(raw_spec())
    assert spec_json(small) is spec_json(small)
    monkeypatch.setattr(spec_text, "_LARGEST", 100)
    assert spec_json(large) == spec_json(small)
    assert spec_json(large) is not spec_json(large)
