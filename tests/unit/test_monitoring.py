"""Dashboards and alert rules, generated from the list of Trainshed's metric series."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

from service.domain.jobs.transitions import start
from service.domain.metrics import ALL
from tests.support.fakes.service import a_job

FOLDER = Path("deploy/grafana/dashboards")
_SERIES = re.compile(r"\btrainshed_\w+")


def known() -> set[str]:
    """Return all names under which Prometheus stores the series."""
    names = {one.full_name for one in ALL}
    return names | {f"{one.full_name}_{part}" for one in ALL if one.kind == "histogram" for part in ("bucket", "count")}


def queries() -> dict[str, str]:
    """Return every query of every panel and variable, by dashboard and title."""
    found = dict[str, str]()
    for file in FOLDER.glob("*.json"):
        made = json.loads(file.read_text())
        for panel in made["panels"]:
            for number, target in enumerate(panel["targets"]):
                found[f"{file.name}: {panel['title']} {number}"] = target["expr"]
    return found


def test_committed_dashboards_equal_the_generated_ones(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "deploy/grafana/build.py", str(tmp_path)], check=True, timeout=120, cwd=Path.cwd())
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_text() for file in FOLDER.iterdir()}, "run: python deploy/grafana/build.py"


def test_panels_and_alerts_query_only_exported_series() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    all_queries = {**queries(), **{rule["alert"]: rule["expr"] for rule in rules}}
    assert len(all_queries) > 30
    unknown = {where: set(_SERIES.findall(query)) - known() for where, query in all_queries.items()}
    assert {where: names for where, names in unknown.items() if names} == {}


def test_series_of_ray_are_exported_by_ray() -> None:
    agent = Path(ray.__file__).parent / "dashboard/modules/reporter/reporter_agent.py"
    exported = {f"ray_{name}" for name in re.findall(r'Gauge\(\s*"(\w+)"', agent.read_text())}
    shown = {name for query in queries().values() for name in re.findall(r"\bray_node_\w+", query)}
    assert len(shown) > 8
    assert shown - exported == set()


def test_thresholds_equal_those_of_the_alerts() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    alarms = dict[str, float]()
    for rule in rules:
        if found := re.search(r"\((trainshed_\w+)[^<>]*\) > (\d+)$", rule["expr"]):
            alarms[found[1]] = float(found[2])
    compared = 0
    for file in FOLDER.glob("*.json"):
        for panel in json.loads(file.read_text())["panels"]:
            (name, *_) = _SERIES.findall(panel["targets"][0]["expr"]) or [""]
            steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
            if name in alarms and steps:
                compared += 1
                assert steps[-1]["value"] == alarms[name], panel["title"]
    assert compared >= 5


def test_every_panel_has_options() -> None:
    """Grafana's types do not allow null."""
    panels = [panel for file in FOLDER.glob("*.json") for panel in json.loads(file.read_text())["panels"]]
    assert [panel["title"] for panel in panels if not panel["options"]] == []


def test_jobs_link_to_their_page_of_ray() -> None:
    made = json.loads((FOLDER / "job.json").read_text())
    (link,) = made["panels"][0]["fieldConfig"]["defaults"]["links"]
    assert made["panels"][0]["targets"][0]["expr"].startswith("max by (name, job_id) (trainshed_job_attempt{")
    # The name of a submission.
    job = start(a_job("job-1"), now=1.0)
    url = link["url"].replace("${__field.labels.job_id}", job.id).replace("${__value.raw}", str(len(job.attempts)))
    assert url == f"${{ray}}/#/jobs/{job.attempts[-1].submission_id}"
    variables = {one["name"]: one for one in made["templating"]["list"]}
    assert variables["ray"]["query"] == "http://localhost:8265"


def test_every_series_is_shown_or_used_by_an_alert() -> None:
    shown = {name for query in queries().values() for name in _SERIES.findall(query)}
    assert {one.full_name for one in ALL if not any(name.startswith(one.full_name) for name in shown)} == set()


def test_service_totals_are_never_summed_over_replicas() -> None:
    totals = {one.full_name for one in ALL if one.whole}
    summed = {
        where: query
        for where, query in queries().items()
        for name in re.findall(r"sum(?: by \([^)]*\))? \((trainshed_\w+)", query)
        if name in totals
    }
    assert summed == {}


def test_every_alert_is_in_the_docs_and_its_runbook_section_exists() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    page, book = (Path(f"docs/operate/{name}.md").read_text() for name in ("monitoring", "runbook"))
    assert [rule["alert"] for rule in rules if f"`{rule['alert']}`" not in page] == []
    anchors = {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in re.findall("^## (.+)", book, re.M)
    }
    targets = [rule["annotations"]["runbook"] for rule in rules if "runbook" in rule["annotations"]]
    assert len(targets) > 5
    assert {target.partition("#")[0] for target in targets} == {"docs/operate/runbook.md"}
    assert {target.partition("#")[2] for target in targets} - anchors == set()


def test_releases_in_one_namespace_do_not_hide_each_other() -> None:
    rules = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    grouped = {
        rule["alert"]: re.findall(r"by \(([^)]+)\)", rule["expr"]) for rule in rules if "trainshed_" in rule["expr"]
    }
    own = {name: [labels for labels in found if "pod" not in labels] for name, found in grouped.items()}
    missing = {
        name
        for name, found in own.items()
        for labels in found
        if not {"namespace", "service"} <= set(labels.split(", "))
    }
    assert missing - {"TrainshedGpuIdle", "TrainshedVolumeFull"} == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_alert_rules_fire_as_expected() -> None:
    for command in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts.test.yml")):
        done = subprocess.run(
            ["promtool", *command], cwd="deploy/prometheus", capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
