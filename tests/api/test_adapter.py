"""Jobs that continue from a folder with adapters: their specs have the settings of the folder."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.support.builders.checkpoints import checkpoint
from tests.support.builders.specs import TINY, infer_spec
from tests.support.fakes.service import FakeService, spec_body
from train_loop.plan import read_shape
from train_loop.spec import LoraSpec, ModelSpec

LORA = LoraSpec(r=4, target_modules=("q_proj",))
MODEL: dict[str, Any] = {"path": "/models/base", "adapter": "/adapters/a", "dtype": "fp32"}


@pytest.fixture
def folder(service: FakeService) -> None:
    """Let preflight find adapters in each folder."""
    service.preflight.shape = read_shape(TINY).adapted(ModelSpec(config=TINY, lora=LORA))
    service.preflight.lora, service.preflight.notes = LORA, ("another base",)


@pytest.mark.usefixtures("folder")
def test_settings_of_the_folder_are_stored_and_shown(client: TestClient) -> None:
    train = spec_body(model=MODEL | {"config": None})
    for body in (train, json.dumps(infer_spec() | {"model": MODEL})):
        plan = client.post("/jobs/plan", content=body).json()
        shown = {
            "field": "model.adapter",
            "written": "/adapters/a",
            "became": {"model.lora": LORA.model_dump(mode="json")},
        }
        assert shown in plan["spellings"]
        answer = client.post("/jobs", content=body)
        assert answer.status_code == 201, answer.text
        job = answer.json()
        assert plan["warnings"] == job["warnings"]
        assert "another base" in job["warnings"]
        assert job["spec"]["model"]["adapter"] == "/adapters/a"
        assert job["spec"]["model"]["lora"] == LORA.model_dump(mode="json")
        again = client.post("/jobs", content=json.dumps(job["spec"]))
        assert again.json()["spec"] == job["spec"], "a printed spec can be sent again"
    cached = client.post("/jobs", content=train).json()
    assert cached["spec"]["model"]["lora"] == LORA.model_dump(mode="json")


@pytest.mark.usefixtures("folder")
def test_clone_from_a_checkpoint_refuses_another_folder(client: TestClient, service: FakeService) -> None:
    job = client.post("/jobs", content=spec_body(model=MODEL | {"config": None})).json()["id"]
    checkpoint(service.run_dir(job), 5)
    other = {"overrides": {"model": {"adapter": "/adapters/b", "lora": None}}}
    (error,) = client.post(f"/jobs/{job}/clone", json=other).json()["errors"]
    assert error["pointer"] == "/model/adapter"
    assert error["message"] == (
        f"adapter=/adapters/b has no effect, because the clone continues from step 5 of {job}; set "
        "from_checkpoint to 0, or remove adapter"
    )
    for body in ({}, other | {"from_checkpoint": 0}):
        assert client.post(f"/jobs/{job}/clone", json=body).status_code == 201


def test_spec_without_a_folder_has_no_such_field(client: TestClient) -> None:
    assert "adapter" not in client.post("/jobs", content=spec_body()).json()["spec"]["model"]
