"""The chart as a whole: lint, golden file, versions, copies, upgrade, and its place in a parent chart."""

import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.hosts.chart_variants import POSTGRES, RWX, VARIANTS
from tests.support.hosts.charts import CHART, CRDS, in_parent_chart, problems, ray_schema, render

COPIES = {
    "dashboards": "deploy/grafana/dashboards",
    "alerts.yml": "deploy/prometheus/alerts.yml",
    # A template cannot read values.yaml itself.
    "values.yaml": "helm/trainshed/values.yaml",
}


@pytest.mark.skipif(ray_schema("RayCluster") is None, reason=f"{CRDS} names no folder with KubeRay's definitions")
def test_ray_cluster_definition_rejects_unknown_fields() -> None:
    cluster = render().of("RayCluster")
    assert problems(cluster) == []
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["contianers"] = []
    assert "contianers" in str(problems(cluster))


def test_chart_passes_helm_lint(tmp_path: Path) -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [one for one in found["messages"] if one["severity"] > 1] == []


def test_volumes_and_keys_are_kept_at_uninstall() -> None:
    rendered = render()
    kept = {
        (one["kind"], one["metadata"]["name"])
        for one in rendered.objects
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {
        ("PersistentVolumeClaim", "demo-trainshed-home"),
        ("PersistentVolumeClaim", "demo-trainshed-storage"),
        ("Secret", "demo-trainshed-admin"),
        ("Secret", "demo-trainshed-metrics"),
    }
    assert "keeps its volumes and keys" in rendered.notes


def test_strategy_owns_its_fields_so_that_it_can_be_changed() -> None:
    """A server-side apply keeps a `rollingUpdate` that the API server filled in, and then rejects Recreate."""
    rolling = render({"strategy": "RollingUpdate", "storage": RWX, **POSTGRES}).of("Deployment")["spec"]["strategy"]
    assert rolling == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert render().of("Deployment")["spec"]["strategy"] == {"type": "Recreate", "rollingUpdate": None}


def test_parent_chart_decides_whether_this_one_is_rendered(tmp_path: Path) -> None:
    own = {"enabled": True, "nodeSelector": None, "database": {"existingSecret": None}, "nameOverride": "t"}
    parent = in_parent_chart(tmp_path / "parent", {"trainshed": own, "global": {"imageRegistry": "r.local"}})
    made = render(chart=parent)
    assert made.of("Deployment")["metadata"]["name"] == "demo-t"
    assert made.of("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"] == "r.local/trainshed:0.1.0"
    assert render({"trainshed": {"enabled": False}}, chart=parent).objects == ()


def test_disruption_budgets_never_keep_unready_pods() -> None:
    budget = render(VARIANTS["replicas"]).of("PodDisruptionBudget")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert render(VARIANTS["one node"]).of("PodDisruptionBudget")["spec"]["maxUnavailable"] == 0


def test_chart_files_equal_those_of_deploy() -> None:
    """The chart has copies, because tools that read a chart from Git skip links."""
    for copy, source in COPIES.items():
        here, there = CHART / "files" / copy, Path(source)
        pairs = [(here / one.name, one) for one in there.iterdir()] if there.is_dir() else [(here, there)]
        for one, other in pairs:
            assert not one.is_symlink()
            assert one.read_text() == other.read_text(), f"cp {other} {one}"


def test_rendered_defaults_equal_the_golden_file() -> None:
    def stable(one: dict[str, Any]) -> dict[str, Any]:
        if one["kind"] == "Secret":
            one["data"] = dict.fromkeys(one["data"], "(random)")
        return one

    objects = [stable(one) for one in render().objects]
    text = "---\n".join(yaml.safe_dump(one, sort_keys=True) for one in objects)
    golden = Path("tests/kubernetes/golden.yaml")
    if not golden.exists():
        golden.write_text(text)
    assert text == golden.read_text(), "check the difference, then delete the file and rerun this test"


def test_versions_equal_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', Path("pyproject.toml").read_text(), re.MULTILINE)
    ray = re.search(r"^ray==(.+)$", Path("constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert ray is not None
    assert (chart["appVersion"], chart["version"]) == (version[1], version[1])
    assert yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"] == ray[1]
