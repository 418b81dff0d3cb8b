"""The chart: each variant renders to what an API server takes, restricted and labelled; bad values are named."""

import json
import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from service.settings import Settings
from tests.support.charts import CHART, CRDS, Rendered, component, problems, ray_schema, render

PRODUCTION = yaml.safe_load((CHART / "examples/values-production.yaml").read_text())
RWX = {"volume": {"accessMode": "ReadWriteMany"}}
POSTGRES = {"database": {"existingSecret": "db"}, "networkPolicy": {"egress": [{"ports": [{"port": 5432}]}]}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "production": PRODUCTION,
    "replicas": {"replicas": 2, "storage": RWX, **POSTGRES},
    "object storage": {"storage": {"runs": "s3://runs/x", "roots": ["s3://data"], "credentialsSecret": "s3"}},
    "own claim": {"storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}}},
    "own Ray": {"ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "token"}},
    "own token": {
        "ray": {"tokenSecret": "token", "interface": "eth1", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    },
    "OpenShift": {"user": {"uid": None, "gid": None}},
    "own keys": {"adminKey": {"existingSecret": "a"}, "metricsKey": {"existingSecret": "m"}},
    "ingress": {"ingress": {"enabled": True, "host": "t.example", "tlsSecret": "tls"}, "trustedProxies": ["10.0.0.1"]},
    "route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["t.example"]}},
    "no policies": {"networkPolicy": {"enabled": False}},
    "monitoring": {"monitoring": dict.fromkeys(("serviceMonitor", "podMonitor", "rules", "dashboards"), True)},
    "settings": {"settings": {"quotas": '{"*": {"jobs": 2}}', "reconcile_seconds": 1, "backfill": False}},
    "global": {"global": {"storageClass": "fast"}},
    "GPUs": {
        "storage": RWX,
        "ray": {"workers": [{"name": "gpu", "replicas": 0, "cpu": "7500m", "memory": "64Gi", "gpu": 8}]},
    },
}


@pytest.fixture(params=VARIANTS, scope="module")
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(VARIANTS[request.param])


def test_objects_are_as_an_api_server_wants_them(rendered: Rendered) -> None:
    found = {f"{one['kind']} {one['metadata']['name']}": problems(one) for one in rendered.objects}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len({(one["kind"], one["metadata"]["name"]) for one in rendered.objects}) == len(rendered.objects)


@pytest.mark.skipif(ray_schema("RayCluster") is None, reason=f"{CRDS} names no folder with KubeRay's definitions")
def test_definition_of_ray_clusters_refuses_unknown_fields() -> None:
    cluster = render().of("RayCluster")
    assert problems(cluster) == []
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["contianers"] = []
    assert "contianers" in str(problems(cluster))


def test_chart_has_no_lint(tmp_path: Path) -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [one for one in found["messages"] if one["severity"] > 1] == []


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
            # A read-only root needs a place for temporary files.
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, name


def test_objects_have_the_standard_labels(rendered: Rendered) -> None:
    for one in rendered.objects:
        labels = one["metadata"]["labels"]
        expected = {"name": "trainshed", "instance": "demo", "part-of": "trainshed", "managed-by": "Helm"}
        assert {name: labels.get(f"app.kubernetes.io/{name}") for name in expected} == expected, one["metadata"]["name"]
        assert labels["app.kubernetes.io/version"]
        assert labels["helm.sh/chart"].startswith("trainshed-")


def test_service_selects_the_pods_of_the_service_alone(rendered: Rendered) -> None:
    selector = rendered.of("Service")["spec"]["selector"]
    assert selector == rendered.of("Deployment")["spec"]["selector"]["matchLabels"]
    selected = [name for name, pod in rendered.pods() if selector.items() <= pod["metadata"]["labels"].items()]
    assert selected == ["api"]
    for name, pod in rendered.pods():
        if name.startswith("ray-"):
            # KubeRay's head Service selects by its own values of these.
            own = {"app.kubernetes.io/name", "app.kubernetes.io/created-by", "ray.io/identifier", "ray.io/cluster"}
            assert not own & pod["metadata"]["labels"].keys(), name


def test_every_reference_leads_to_something(rendered: Rendered) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in rendered.objects}
    given = {"a", "m", "db", "s3", "token", "tls", "mine", "registry-login", "demo-trainshed-ray"}
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


def test_no_secret_is_anywhere_but_in_secrets(rendered: Rendered) -> None:
    secrets = [value for one in rendered.objects if one["kind"] == "Secret" for value in one["data"].values()]
    others = json.dumps([one for one in rendered.objects if one["kind"] != "Secret"]) + rendered.notes
    assert all(secret not in others for secret in secrets)
    for name, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            told = json.dumps([container.get("command"), container.get("args")])
            assert not re.search("(?i)password|token|secret", told), name


def test_what_uninstalling_keeps() -> None:
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


def test_notes_end_with_a_call_that_works() -> None:
    *_, forward, key, call = render().notes.strip().splitlines()
    assert forward == "kubectl port-forward --namespace ml service/demo-trainshed 8000:8000 &"
    assert "secret demo-trainshed-admin " in key
    assert call == 'curl -H "Authorization: Bearer $KEY" http://localhost:8000/jobs'
    outside = render(VARIANTS["ingress"]).notes.strip().splitlines()[-1]
    assert outside.endswith("https://t.example/jobs")


def test_callers_may_use_every_name_of_the_service() -> None:
    hosts = render(VARIANTS["ingress"]).of("ConfigMap", "demo-trainshed")["data"]["TRAINSHED_ALLOWED_HOSTS"].split(",")
    assert hosts[0] == "demo-trainshed"
    assert {"demo-trainshed.ml.svc", "t.example"} <= set(hosts)


def test_policies_open_what_is_needed() -> None:
    rendered = render(PRODUCTION)
    api = rendered.of("NetworkPolicy", "demo-trainshed-api")["spec"]
    assert [rule["ports"] for rule in api["ingress"]] == [[{"port": 8000}]]
    ports = [port["port"] for rule in api["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 443, 8265, 5432]
    head = rendered.of("NetworkPolicy", "demo-trainshed-ray-head")["spec"]
    dashboard = next(rule for rule in head["ingress"] if rule.get("ports") == [{"port": 8265}])
    labels = next(pod for name, pod in rendered.pods() if name == "api")["metadata"]["labels"]
    assert dashboard["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


GUARDS: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "set database.existingSecret, or replicas: 1"),
    ({"strategy": "RollingUpdate"}, "or strategy: Recreate"),
    ({"replicas": 2, **POSTGRES}, "set storage.volume.accessMode to ReadWriteMany"),
    (
        {"ray": {"workers": [{"name": n, "replicas": 1, "cpu": 1, "memory": "1Gi"} for n in ("a", "b")]}},
        "or keep one group",
    ),
    ({"ray": {"address": "http://ray:8265", "tokenSecret": "t"}}, "leave ray.address empty, or set ray.create: false"),
    ({"ray": {"create": False}}, "set ray.create: true, or ray.address"),
    ({"ray": {"create": False, "address": "http://ray:8265"}}, "ray.address needs ray.tokenSecret"),
    ({"ray": {"image": {"tag": "0.0.9"}}}, "or set ray.allowVersionSkew: true"),
    ({"ingress": {"enabled": True, "tlsSecret": "tls"}}, "ingress.enabled needs ingress.host"),
    ({"ingress": {"enabled": True, "host": "t.example"}}, "keys must not travel in the clear"),
    ({"ingress": {"enabled": True, "host": "t.example/trainshed", "tlsSecret": "tls"}}, "give it a host of its own"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
    ({"database": {"existingSecret": "db"}}, "set networkPolicy.egress"),
    (
        {"storage": RWX, "ray": {"workers": [{"name": "a", "replicas": 1, "cpu": 1, "memory": "1Gi"}] * 2}},
        "give each its own name",
    ),
    ({"settings": {"runs": "s3://x"}}, "the chart sets TRAINSHED_RUNS itself"),
]


@pytest.mark.parametrize(("values", "said"), GUARDS, ids=[said for _, said in GUARDS])
def test_contradictions_are_refused_with_the_remedy(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(said)):
        render(values)


def test_every_guard_has_a_case() -> None:
    guards = (CHART / "templates/_guards.tpl").read_text().count("fail ")
    # A cluster without KubeRay cannot be played here: a render without a cluster must pass.
    assert guards == len(GUARDS) + 2
    with pytest.raises(helm.HelmError, match="choose a shorter release name"):
        render(name="n" * 38)
    assert render(name="n" * 36).of("RayCluster")["metadata"]["name"] == f"{'n' * 36}-trainshed-ray"


SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"ray": {"worker": []}}, "additional properties 'worker' not allowed"),
    ({"replicas": 0}, "/replicas"),
    ({"strategy": "Rolling"}, "/strategy"),
    ({"storage": {"runs": "file:///srv"}}, "/storage/runs"),
    ({"storage": {"runs": "bucket/runs"}}, "/storage/runs"),
    ({"storage": {"volume": {"accessMode": "RWX"}}}, "/storage/volume/accessMode"),
    ({"home": {"size": "5 GB"}}, "/home/size"),
    ({"settings": {"qotas": "{}"}}, "invalid propertyName 'qotas'"),
    ({"ray": {"address": "ray:10001"}}, "/ray/address"),
    ({"ray": {"version": "2.60"}}, "/ray/version"),
    ({"ray": {"workers": []}}, "/ray/workers"),
    ({"ray": {"workers": [{"name": "GPU", "replicas": 1, "cpu": 1, "memory": "1Gi"}]}}, "/ray/workers/0/name"),
    ({"user": {"uid": 0}}, "/user/uid"),
    ({"image": {"pullPolicy": "always"}}, "/image/pullPolicy"),
    ({"pdb": "yes"}, "/pdb"),
]


@pytest.mark.parametrize(("values", "said"), SCHEMA, ids=[said for _, said in SCHEMA])
def test_values_of_the_wrong_kind_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(said)):
        render(values)


def test_schema_knows_all_settings_and_all_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["settings"]["propertyNames"]["enum"] == sorted(Settings.model_fields)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    for name, section in schema["properties"].items():
        if section.get("additionalProperties") is False:
            assert section["properties"].keys() == values[name].keys(), name


def test_values_are_few_and_explained() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert len(lines) <= 250
    blocks = [line for line in lines if re.match(r"\w", line)]
    for name in blocks:
        before = lines[lines.index(name) - 1]
        inside = lines[lines.index(name) + 1 :][:2]
        assert before.startswith("#") or any("#" in line for line in inside), name


def test_rendered_defaults_are_those_of_the_golden_file() -> None:
    def stable(one: dict[str, Any]) -> dict[str, Any]:
        if one["kind"] == "Secret":
            one["data"] = dict.fromkeys(one["data"], "(random)")
        return one

    objects = [stable(one) for one in render().objects]
    text = "---\n".join(yaml.safe_dump(one, sort_keys=True) for one in objects)
    golden = Path("tests/kubernetes/golden.yaml")
    if not golden.exists():
        golden.write_text(text)
    assert text == golden.read_text(), "look at the difference, then remove the file and run this test again"


def test_versions_are_those_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.+)"$', Path("pyproject.toml").read_text(), re.MULTILINE)
    ray = re.search(r"^ray==(.+)$", Path("constraints.txt").read_text(), re.MULTILINE)
    assert version is not None
    assert ray is not None
    assert (chart["appVersion"], chart["version"]) == (version[1], version[1])
    assert yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"] == ray[1]


def test_test_pod_is_let_in(rendered: Rendered) -> None:
    pod = next(one for one in rendered.objects if one["kind"] == "Pod")
    assert component(pod) == "test"
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    policies = [one for one in rendered.objects if one["metadata"]["name"].endswith("-api")]
    for policy in policies:
        for rule in policy["spec"]["ingress"]:
            peers = [peer.get("podSelector", {}).get("matchLabels") for peer in rule.get("from", [])]
            labels = pod["metadata"]["labels"]
            assert not peers or any(peer and peer.items() <= labels.items() for peer in peers)
