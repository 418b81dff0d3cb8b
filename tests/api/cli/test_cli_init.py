"""`trainshed init`: what it writes and what it leaves alone. test_cli_every.py plans each template."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tests.support.clients.command import run
from train_loop.spec import dump_schema, job_schema, parse_text, read_yaml
from trainshed.cli.commands.init import Template


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, beside a home that does not exist."""
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path / "home"))
    (folder := tmp_path / "work").mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("template", Template)
def test_template_is_a_valid_commented_spec(folder: Path, template: Template) -> None:
    assert run("init", "--from", template).exit_code == 0
    text = (folder / "job.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=job.schema.json\n")
    assert max(map(len, text.splitlines())) <= 120 or template in (Template.SFT, Template.LORA)
    assert list(Draft202012Validator(job_schema()).iter_errors(read_yaml(text))) == []
    assert parse_text(text).name == f"my-{template}".replace("pretrain", "pretraining")
    assert (folder / "job.schema.json").read_text() == dump_schema()


def test_default_template_is_pretrain_and_needs_no_home(folder: Path, tmp_path: Path) -> None:
    written = run("init")
    assert (written.exit_code, written.stdout) == (0, "job.yaml\n")
    assert written.stderr.endswith("next: trainshed plan job.yaml\n")
    assert (folder / "job.yaml").read_bytes() == (files("trainshed.cli") / "templates/pretrain.yaml").read_bytes()
    assert not (tmp_path / "home").exists()


def test_sft_writes_its_data_below_a_storage_root(folder: Path, tmp_path: Path) -> None:
    done = json.loads(run("init", "tune.yaml", "--from", "sft", "--json").stdout)
    data = tmp_path / "home/runs/samples/instructions.jsonl"
    assert done == {"template": "sft", "spec": "tune.yaml", "json_schema": "job.schema.json", "data": str(data)}
    assert read_yaml((folder / "tune.yaml").read_bytes())["data"]["train"] == {"path": data.as_uri()}
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    assert len(rows) > 100
    assert all(row.keys() == {"prompt", "response"} and all(row.values()) for row in rows)


def test_existing_file_is_kept_without_force(folder: Path) -> None:
    (folder / "job.yaml").write_text("mine")
    refused = run("init", "--from", "sft")
    assert (refused.exit_code, refused.stdout, refused.stderr) == (
        2,
        "",
        "trainshed: job.yaml already exists; name a new file, or add --force to replace it\n",
    )
    assert [file.name for file in folder.iterdir()] == ["job.yaml"]
    assert (folder / "job.yaml").read_text() == "mine"
    assert run("init", "--force").exit_code == 0
    assert (folder / "job.yaml").read_text() != "mine"


def test_foreign_file_with_the_name_of_the_schema_is_kept_without_force(folder: Path) -> None:
    (folder / "job.schema.json").write_text("{}")
    refused = run("init")
    assert (refused.exit_code, "job.schema.json already exists" in refused.stderr) == (2, True)
    assert (folder / "job.schema.json").read_text() == "{}"
    (folder / "job.schema.json").write_text(dump_schema().replace("minimum", "maximum"))
    assert run("init").exit_code == 0
    assert (folder / "job.schema.json").read_text() == dump_schema()


def test_folder_that_does_not_exist_is_a_usage_error(folder: Path) -> None:
    refused = run("init", "nowhere/job.yaml")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("trainshed: nowhere/job.yaml: No such file or directory")
    assert run("init", "--from", "rlhf").exit_code == 2
