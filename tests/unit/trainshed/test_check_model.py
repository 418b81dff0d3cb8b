"""`trainshed check-model`: its output and exit codes; tests/distributed/test_check_model.py has the checks."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.builders.specs import code_spec, raw_spec
from train_loop.conformance.finding import Finding
from trainshed.cli.commands import check_model
from trainshed.cli.exit_codes import Exit
from trainshed.cli.main import app

HOLDS = Finding(guarantee="a step is deterministic", verdict="holds", seen="two steps have the same bits")
FAILS = Finding(guarantee="accumulation", verdict="does not hold", seen="differs by 1e-1", remedy="return a sum")
UNTESTED = Finding(guarantee="sequence 2", verdict="not tested", seen="code.sequence is not set")


@pytest.mark.parametrize(("found", "code"), [([HOLDS, UNTESTED], Exit.DONE), ([HOLDS, FAILS], Exit.FAILED)])
def test_output_has_a_line_for_each_guarantee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Finding], code: Exit
) -> None:
    monkeypatch.setattr(check_model, "_checked", lambda job: iter(found))
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(code_spec()))
    text = CliRunner().invoke(app, ["check-model", str(file)])
    assert text.exit_code == code
    assert all(f"{one.guarantee}: {one.seen}" in text.stdout for one in found)
    assert ("→ return a sum" in text.stdout) == (FAILS in found)
    answer = CliRunner().invoke(app, ["check-model", str(file), "--json"])
    assert answer.exit_code == code
    assert json.loads(answer.stdout) == {"ok": code == Exit.DONE, "findings": [one.model_dump() for one in found]}


def test_spec_that_cannot_be_checked_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(raw_spec()))
    without = CliRunner().invoke(app, ["check-model", str(file)])
    assert (without.exit_code, without.stdout) == (Exit.FAILED, "")
    assert "has no own code (code)" in without.stderr
    invalid = CliRunner().invoke(app, ["check-model", str(file), "--set", "training.max_steps=x"])
    assert invalid.exit_code == Exit.USAGE
    assert "max_steps" in invalid.stderr
