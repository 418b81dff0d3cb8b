"""Pods of the chart: images, settings, memory, placement and what makes KubeRay replace them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts.chart_variants import PRODUCTION, RWX, VARIANTS
from tests.support.hosts.charts import CHART, problems, render


@pytest.mark.skipif(shutil.which("jq") is None, reason="the command of the runbook needs jq")
@pytest.mark.parametrize("variant", ["defaults", "own keys", "OpenShift"])
def test_restore_pod_of_the_runbook_equals_the_service_pod(variant: str) -> None:
    (program,) = re.findall(r"jq '(\{apiVersion.+?)' \|", Path("docs/operate/runbook.md").read_text(), re.DOTALL)
    deployment = render(VARIANTS[variant]).of("Deployment")
    made = subprocess.run(["jq", program], input=json.dumps(deployment), capture_output=True, text=True, check=True)
    pod, template = json.loads(made.stdout), deployment["spec"]["template"]["spec"]
    assert problems(pod) == []
    (container,), (original,) = pod["spec"].pop("containers"), template["containers"]
    assert pod["spec"] | {"containers": template["containers"]} == template | {"restartPolicy": "Never"}
    assert container["args"][:2] == ["sh", "-c"]
    kept = original.keys() - {"args", "env", "ports", "lifecycle", "startupProbe", "readinessProbe", "livenessProbe"}
    assert container.keys() == kept | {"args", "env"}
    assert {name: container[name] for name in kept} == {name: original[name] for name in kept}
    keys = [one["value"] for one in container["env"] if one["name"] == "TRAINSHED_ADMIN_KEY_FILE"]
    assert keys == ["/dev/null"]


@pytest.mark.parametrize("variant", ["defaults", "production"])
def test_concurrent_checks_fit_into_the_pod_memory(variant: str) -> None:
    rendered = render(VARIANTS[variant])
    settings = rendered.of("ConfigMap", "demo-trainshed")["data"]
    checks = int(settings["TRAINSHED_PREFLIGHT_CHECKS"]) * int(settings["TRAINSHED_PREFLIGHT_MEMORY_BYTES"])
    (container,) = rendered.of("Deployment")["spec"]["template"]["spec"]["containers"]
    limit = re.fullmatch(r"(\d+)Gi", container["resources"]["limits"]["memory"])
    assert limit is not None
    # Service and helper process took 511 MiB, measured as PSS.
    assert (768 << 20) + checks <= int(limit[1]) << 30


def test_integers_are_rendered_as_integers() -> None:
    rendered = render(VARIANTS["large numbers"])
    assert rendered.of("ConfigMap", "demo-trainshed")["data"]["TRAINSHED_MAX_BODY_BYTES"] == "10485760"
    text = rendered.files["trainshed/templates/deployment.yaml"]
    assert "runAsUser: 1000680000\n" in text
    assert "fsGroup: 1000680000\n" in text


@pytest.mark.parametrize("name", ["tolerations", "schedulingGates"])
@pytest.mark.parametrize("group", ["head", "worker"])
def test_change_that_kuberay_ignores_changes_what_it_looks_at(name: str, group: str) -> None:
    """KubeRay's hash has no tolerations and gates, so that only a change elsewhere makes it replace the pods."""
    changed = {name: [{"name": "a.example/b"} if name == "schedulingGates" else {"key": "gpu", "operator": "Exists"}]}
    worker = {"name": "cpu", "replicas": 2, "cpu": 2, "memory": "6Gi"}
    values = {"head": {**changed}} if group == "head" else {"workers": [{**worker, **changed}]}
    specs = [render({"storage": RWX, "ray": one}).of("RayCluster")["spec"] for one in ({}, values)]
    assert hashed(specs[0]) != hashed(specs[1])
    assert hashed(specs[0]) == hashed(render({"storage": RWX, "replicas": 0}).of("RayCluster")["spec"])


def hashed(spec: dict[str, Any]) -> str:
    """Return the part of a RayCluster that KubeRay's hash covers, as JSON."""
    spec = json.loads(json.dumps(spec))
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for name in ("tolerations", "schedulingGates"):
            group["template"]["spec"].pop(name, None)
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
    return json.dumps(spec, sort_keys=True)


def test_doctor_knows_the_digest_of_every_pod() -> None:
    rendered = render(PRODUCTION)
    known = rendered.of("ConfigMap", "demo-trainshed")["data"]["TRAINSHED_RAY_POD_DIGESTS"].split(",")
    pods = [pod for name, pod in rendered.pods() if name.startswith("ray-")]
    assert sorted(known) == sorted(pod["metadata"]["annotations"]["trainshed.io/pod-digest"] for pod in pods)
    assert len(set(known)) == len(pods) == 3


def test_own_toleration_replaces_that_of_the_chart() -> None:
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7}
    pod = render({"tolerations": [own], "storage": RWX}).of("Deployment")["spec"]["template"]["spec"]
    assert [one["tolerationSeconds"] for one in pod["tolerations"]] == [7, 30]


def test_images_have_registry_and_digest() -> None:
    def images(values: dict[str, Any]) -> list[str]:
        made = render(values)
        return sorted({one["image"] for _, pod in made.pods() for one in pod["spec"]["containers"]})

    assert images(VARIANTS["parent chart"]) == ["r.local:5000/trainshed-worker:0.1.0", "r.local:5000/trainshed:0.1.0"]
    assert images(VARIANTS["digest"]) == ["trainshed-worker:1", f"trainshed@sha256:{'a' * 64}"]


def test_settings_may_be_maps_and_lists() -> None:
    settings = render(VARIANTS["maps and lists"]).of("ConfigMap", "demo-trainshed")["data"]
    assert settings["TRAINSHED_QUOTAS"] == '{"nlp":{"gpus":16}}'
    assert settings["TRAINSHED_MAX_PRIORITY"] == '{"nlp":10}'
    assert settings["TRAINSHED_WEBHOOK_ALLOWED"] == "10.0.0.0/8,hooks.example"


def test_new_chart_version_keeps_the_ray_cluster(tmp_path: Path) -> None:
    """KubeRay replaces a cluster if anything but a replica count has changed."""
    pinned = {"image": {"tag": "a"}, "ray": {"image": {"tag": "a"}}}
    newer = tmp_path / "trainshed"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("0.1.0", "9.9.9"))
    assert render(pinned).of("RayCluster")["spec"] == render(pinned, chart=newer).of("RayCluster")["spec"]
