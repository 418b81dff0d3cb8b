"""`trainshed import`: the spec, the report, and errors with their place."""

import json
import os
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from train_loop.spec import parse_text
from trainshed.cli.exit_codes import Exit
from trainshed.cli.main import app

ARGUMENTS = {
    "learning_rate": 1e-5,
    "output_dir": "out",
    "max_steps": 10,
    "bf16": True,
    "neftune_noise_alpha": 5,
    "lr_scheduler_type": "cosine",
}


def invoke(*words: str | Path, text: str | None = None) -> Result:
    return CliRunner(env={"COLUMNS": "500"}).invoke(app, ["import", *map(str, words)], input=text)


@pytest.fixture
def arguments(tmp_path: Path) -> Path:
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps(ARGUMENTS))
    return file


def test_spec_is_printed_and_the_report_is_on_stderr(arguments: Path) -> None:
    result = invoke(arguments)
    assert result.exit_code == Exit.DONE
    assert parse_text(result.stdout).training.learning_rate == 1e-5
    assert "# replace model.path: " in result.stdout
    assert "# changes numbers: neftune_noise_alpha: embeddings get no noise" in result.stdout
    lines = result.stderr.splitlines()
    assert any(line.startswith("≠ not supported neftune_noise_alpha (embeddings get no noise)") for line in lines)
    assert any(line.startswith("  taken         max_steps → training.max_steps: 10") for line in lines)
    assert f"next: trainshed plan FILE --set model.path=… --set data.train.path=…" in result.stderr  # noqa: F541


def test_spec_is_written_and_the_report_is_on_stdout(arguments: Path, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    result = invoke(
        arguments, "--output", spec, "--set", "model.path=/m", "--set", "data.train.path=/d", "--set", "name=x"
    )
    assert result.exit_code == Exit.DONE, result.output
    job = parse_text(spec.read_text())
    assert (job.name, job.model.path) == ("x", "/m")
    assert "neftune_noise_alpha" in result.stdout
    assert "# replace model.path" not in spec.read_text()


def test_json_has_the_spec_and_a_row_for_each_field(arguments: Path) -> None:
    result = invoke(arguments, "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, answer["formats"]) == (Exit.DONE, "", ["TrainingArguments"])
    assert ARGUMENTS.keys() <= {row["field"] for row in answer["rows"]}
    assert parse_text(json.dumps(answer["spec"])).training.max_steps == 10


def test_several_files_and_standard_input_become_one_spec(arguments: Path) -> None:
    accelerate = yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16"})
    job = parse_text(invoke("-", arguments, text=accelerate).stdout)
    assert (job.scaling.world, job.training.max_steps) == (4, 10)


def test_defaults_of_hydra_are_read_beside_the_file(tmp_path: Path) -> None:
    worker = {
        "training_args": {"learning_rate": 1e-5},
        "strategy_args": {"strategy_name": "fsdp2_train"},
        "device_mapping": "list(range(0,2))",
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"sft_train": worker, "pretrain": "/m"}))
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [base]\nexp_name: mine\n")
    assert parse_text(invoke(file).stdout).scaling.world == 2
    refused = invoke("-", text=file.read_text())
    assert refused.exit_code == Exit.USAGE
    assert "the config base.yaml of defaults cannot be read" in refused.stderr


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: 1\n", "unknown format"),
        ("learning_rate: -1\ndo_train: true\n", ":1:1: learning_rate: input should be greater than 0"),
        ("output_dir: x\noutput_dir: y\n", ":2:1: output_dir is given twice"),
        ("output_dir: [\n", "neither YAML nor JSON"),
    ],
)
def test_bad_file_is_an_error_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    result = invoke(file)
    assert (result.exit_code, result.stdout) == (Exit.USAGE, "")
    assert f"{file}" in result.stderr
    assert error in result.stderr


def test_text_of_the_source_cannot_control_the_terminal_or_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({**ARGUMENTS, "x\nname: evil\x1b[2J": "y\x1b[2J\n", "run_name": "a\nb"}))
    result = invoke(file)
    assert result.exit_code == Exit.DONE
    assert "\x1b" not in result.output
    assert parse_text(result.stdout).name == "a-b"


def test_absent_file_is_an_error(tmp_path: Path) -> None:
    result = invoke(tmp_path / "absent.yaml")
    assert result.exit_code == Exit.USAGE
    assert "No such file or directory; name a readable configuration" in result.stderr


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_file_without_end_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "run.yaml"
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    result = invoke(file)
    assert result.exit_code == Exit.USAGE
    assert f"{file} is not a regular file; name a readable configuration, or - to read stdin" in result.stderr


def test_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    with file.open("wb") as opened:
        opened.truncate((16 << 20) + 1)
    result = invoke(file)
    assert result.exit_code == Exit.USAGE
    assert f"{file} is larger than 16 MiB; name a smaller configuration" in result.stderr


@pytest.mark.parametrize("name", ["../base", "a/../../base", "link", "folder/base", "/../base", "{optional ..: base}"])
def test_defaults_outside_of_the_folder_of_the_file_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "base.yaml").write_text("pretrain: /m\n")
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "link.yaml").symlink_to(tmp_path / "base.yaml")
    (folder / "folder").symlink_to(tmp_path)
    file = folder / "run.yaml"
    file.write_text(f"defaults: [{name}]\nexp_name: mine\n")
    result = invoke(file)
    assert result.exit_code == Exit.USAGE
    assert "which lies outside of its folder; import the file from a folder above both" in result.stderr
