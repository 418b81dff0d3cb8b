"""Properties of every object in every variant: valid, restricted and labelled; references resolve."""

import json
import re

import pytest

from tests.support.hosts.chart_variants import VARIANTS
from tests.support.hosts.charts import Rendered, component, problems, render


@pytest.fixture(params=VARIANTS, scope="module")
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(VARIANTS[request.param])


def test_objects_are_accepted_by_the_api_schema(rendered: Rendered) -> None:
    found = {f"{one['kind']} {one['metadata']['name']}": problems(one) for one in rendered.objects}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len({(one["kind"], one["metadata"]["name"]) for one in rendered.objects}) == len(rendered.objects)


def test_pods_are_restricted(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        spec, security = pod["spec"], pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"}), name
        assert security.get("runAsUser") != 0, name
        assert spec["automountServiceAccountToken"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
        assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} <= allowed, name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            own = container["securityContext"]
            assert own == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert not any("hostPort" in port for port in container.get("ports", [])), name
            assert "memory" in container["resources"]["limits"], name
            # A read-only root needs a volume for temporary files.
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, name


def test_variable_names_are_unique(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            names = [one["name"] for one in container.get("env", [])]
            assert len(names) == len(set(names)), name


def test_objects_have_the_standard_labels(rendered: Rendered) -> None:
    for one in rendered.objects:
        labels = one["metadata"]["labels"]
        expected = {"name": "trainshed", "instance": "demo", "part-of": "trainshed", "managed-by": "Helm"}
        assert {name: labels.get(f"app.kubernetes.io/{name}") for name in expected} == expected, one["metadata"]["name"]
        assert labels["app.kubernetes.io/version"]
        assert labels["helm.sh/chart"].startswith("trainshed-")


def test_service_selects_only_the_service_pods(rendered: Rendered) -> None:
    selector = rendered.of("Service")["spec"]["selector"]
    assert selector == rendered.of("Deployment")["spec"]["selector"]["matchLabels"]
    selected = [name for name, pod in rendered.pods() if selector.items() <= pod["metadata"]["labels"].items()]
    assert selected == ["api"]
    for name, pod in rendered.pods():
        if name.startswith("ray-"):
            # KubeRay's head Service has its own values for these selectors.
            own = {"app.kubernetes.io/name", "app.kubernetes.io/created-by", "ray.io/identifier", "ray.io/cluster"}
            assert not own & pod["metadata"]["labels"].keys(), name


def test_every_reference_resolves(rendered: Rendered) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered.objects}
    given = {"a", "m", "db", "s3", "token", "tls", "mine", "registry-login", "demo-trainshed-ray", "other-ray"}
    given |= {"demo-training-ray"}
    given |= {"trainshed-database", "trainshed-admin-key", "trainshed-metrics-key", "trainshed-s3", "trainshed-tls"}
    for name, pod in rendered.pods():
        text = json.dumps(pod)
        for kind, pattern in (
            ("ConfigMap", r'"configMap(?:Ref)?": \{"name": "([^"]+)"'),
            ("Secret", r'"secret(?:KeyRef|Ref)": \{(?:"key": "[^"]+", )?"name": "([^"]+)"'),
            ("Secret", r'"secretName": "([^"]+)"'),
            ("PersistentVolumeClaim", r'"claimName": "([^"]+)"'),
            ("ServiceAccount", r'"serviceAccountName": "([^"]+)"'),
        ):
            for wanted in re.findall(pattern, text):
                assert (kind, wanted) in there or wanted in given, (name, kind, wanted)


def test_secrets_occur_only_in_secret_objects(rendered: Rendered) -> None:
    secrets = [value for one in rendered.objects if one["kind"] == "Secret" for value in one["data"].values()]
    others = json.dumps([one for one in rendered.objects if one["kind"] != "Secret"]) + rendered.notes
    assert all(secret not in others for secret in secrets)
    for name, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            command_line = json.dumps([container.get("command"), container.get("args")])
            assert not re.search("(?i)password|token|secret", command_line), name


def test_pods_leave_a_lost_node_within_seconds(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        seconds = {one.get("key"): one.get("tolerationSeconds") for one in pod["spec"]["tolerations"]}
        assert {seconds[f"node.kubernetes.io/{taint}"] for taint in ("not-ready", "unreachable")} == {30}, name


def test_ray_pods_reap_orphans_and_bound_their_disk(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        (tmp,) = [one for one in pod["spec"]["volumes"] if one["name"] == "tmp"]
        assert tmp["emptyDir"]["sizeLimit"], name
        if name.startswith("ray-"):
            assert pod["spec"]["shareProcessNamespace"] is True, name
        if name != "test":
            (container,) = pod["spec"]["containers"]
            for kind in ("requests", "limits"):
                assert container["resources"][kind]["ephemeral-storage"], name


def test_policies_do_not_have_names_of_kuberay(rendered: Rendered) -> None:
    clusters = [one["metadata"]["name"] for one in rendered.objects if one["kind"] == "RayCluster"]
    own = {one["metadata"]["name"] for one in rendered.objects if one["kind"] == "NetworkPolicy"}
    assert not own & {f"{name}-{part}" for name in clusters for part in ("head", "workers", "worker")}


def test_helm_test_pod_is_allowed_by_the_policies(rendered: Rendered) -> None:
    pod = next(one for one in rendered.objects if one["kind"] == "Pod")
    assert component(pod) == "test"
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    policies = [one for one in rendered.objects if one["metadata"]["name"].endswith("-api")]
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            peers = [peer.get("podSelector", {}).get("matchLabels") for peer in rule.get("from", [])]
            labels = pod["metadata"]["labels"]
            assert not peers or any(peer and peer.items() <= labels.items() for peer in peers)
