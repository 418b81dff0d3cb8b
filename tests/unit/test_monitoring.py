"""Dashboards and alert rules: made from the list of our series, and from nothing else."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.domain.metrics import ALL

FOLDER = Path("deploy/grafana/dashboards")
_SERIES = re.compile(r"\btrainshed_\w+")


def known() -> set[str]:
    """All names under which Prometheus stores our series."""
    names = {one.full_name for one in ALL}
    return names | {f"{one.full_name}_{part}" for one in ALL if one.kind == "histogram" for part in ("bucket", "count")}


def queries() -> dict[str, str]:
    """Every query of every panel and variable, by dashboard and title."""
    found = dict[str, str]()
    for file in FOLDER.glob("*.json"):
        made = json.loads(file.read_text())
        for panel in made["panels"]:
            for number, target in enumerate(panel["targets"]):
                found[f"{file.name}: {panel['title']} {number}"] = target["expr"]
    return found


def test_committed_dashboards_are_those_that_the_list_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "deploy/grafana/build.py", str(tmp_path)], check=True, timeout=120, cwd=Path.cwd())
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_text() for file in FOLDER.iterdir()}, "run: python deploy/grafana/build.py"


def test_no_panel_and_no_alert_asks_for_a_series_that_nobody_tells() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    asked = {**queries(), **{rule["alert"]: rule["expr"] for rule in rules}}
    assert len(asked) > 30
    unknown = {where: set(_SERIES.findall(query)) - known() for where, query in asked.items()}
    assert {where: names for where, names in unknown.items() if names} == {}


def test_every_series_but_those_of_the_alerts_is_shown() -> None:
    shown = {name for query in queries().values() for name in _SERIES.findall(query)}
    assert {one.full_name for one in ALL if not any(name.startswith(one.full_name) for name in shown)} == set()


def test_totals_of_the_whole_service_are_never_added_over_replicas() -> None:
    totals = {one.full_name for one in ALL if one.whole}
    summed = {
        where: query
        for where, query in queries().items()
        for name in re.findall(r"sum(?: by \([^)]*\))? \((trainshed_\w+)", query)
        if name in totals
    }
    assert summed == {}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alert_rules_fire_when_they_should() -> None:
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")):
        done = subprocess.run(
            ["promtool", *command], cwd="deploy/prometheus", capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
