"""The chart: every variant renders to valid, restricted and labelled objects; invalid values are named."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.hosts.charts import CHART, CRDS, Rendered, component, problems, ray_schema, render

PRODUCTION = yaml.safe_load((CHART / "examples/values-production.yaml").read_text())
RWX = {"volume": {"accessMode": "ReadWriteMany"}}
POSTGRES = {"database": {"existingSecret": "db"}, "networkPolicy": {"egress": [{"ports": [{"port": 5432}]}]}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "production": PRODUCTION,
    "replicas": {"replicas": 2, "storage": RWX, **POSTGRES},
    "object storage": {"storage": {"runs": "s3://runs/x", "roots": ["s3://data"], "credentialsSecret": "s3"}},
    "own claim": {"storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}}},
    "own Ray": {
        "storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}},
        "ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "token"},
    },
    "own token": {
        "ray": {"tokenSecret": "token", "interface": "eth1", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}
    },
    "OpenShift": {"user": {"uid": None, "gid": None}},
    "own keys": {"adminKey": {"existingSecret": "a"}, "metricsKey": {"existingSecret": "m"}},
    "ingress": {"ingress": {"enabled": True, "host": "t.example", "tlsSecret": "tls"}, "trustedProxies": ["10.0.0.1"]},
    "route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["t.example"]}},
    "TLS of the controller": {"ingress": {"enabled": True, "host": "t.example", "tls": "controller"}},
    "route of the listener": {
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
        "allowedHosts": ["t.example"],
    },
    "IPv6": {"ipFamily": "IPv6"},
    "dual-stack": {"ipFamily": "dual"},
    "one node": {
        "storage": {
            "volume": {"singleNode": True, "volumeName": "disk", "annotations": {"a": "b"}, "selector": {"c": "d"}}
        },
        "ray": {
            "head": {"pdb": True},
            "workers": [{"name": n, "replicas": 1, "cpu": 1, "memory": "4Gi", "gpu": 4} for n in ("a", "b")],
        },
    },
    "parent chart": {
        "enabled": True,
        "global": {"imageRegistry": "r.local:5000/"},
        "imagePullSecrets": [{"name": "a"}],
    },
    "own name": {"fullnameOverride": "other"},
    "own part of the name": {"nameOverride": "training"},
    "gates": {"ray": {"head": {"schedulingGates": [{"name": "example.com/quota"}]}}},
    "maps and lists": {
        "settings": {
            "quotas": {"nlp": {"gpus": 16}},
            "max_priority": {"nlp": 10},
            "webhook_allowed": ["10.0.0.0/8", "hooks.example"],
        }
    },
    "no policies": {"networkPolicy": {"enabled": False}},
    "monitoring": {
        "monitoring": {
            **dict.fromkeys(("serviceMonitor", "podMonitor", "rules", "dashboards"), True),
            "labels": {"release": "prometheus", "app.kubernetes.io/part-of": "trainshed"},
            "interval": "15s",
            "relabelings": [{"targetLabel": "region", "replacement": "eu"}],
            "grafanaFolder": "ml",
        },
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
    },
    "one GPU node": {
        "nodeSelector": {"pool": "gpu"},
        "ray": {
            "head": {"nodeSelector": {"pool": "gpu"}},
            "workers": [
                {"name": "gpu", "replicas": 1, "cpu": 0.5, "memory": "64Gi", "gpu": 8, "nodeSelector": {"pool": "gpu"}}
            ],
        },
    },
    "large numbers": {"user": {"uid": 1000680000, "gid": 1000680000}, "settings": {"max_body_bytes": 10485760.0}},
    "interfaces": {"ray": {"interface": "^lo,eth0"}},
    "one small group": {"ray": {"workers": [{"name": "cpu", "replicas": 1, "cpu": 2, "memory": "4Gi"}]}},
    "digests": {"image": {"tag": f"1@sha256:{'a' * 64}"}, "ray": {"image": {"tag": f"1@sha256:{'b' * 64}"}}},
    "digest": {"image": {"digest": f"sha256:{'a' * 64}"}, "ray": {"image": {"tag": "1"}}},
    "own Ray and object storage": {
        "storage": {"runs": "s3://runs", "volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}},
        "ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "token"},
    },
    "roots by project": {"storage": {"roots": {"nlp": ["s3://nlp"], "*": ["s3://all"]}}},
    "variables": {"env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel:4318"}]},
    "own timeouts": {
        "ray": {
            "interface": "eth0",
            "env": [
                {"name": "RAY_health_check_period_ms", "value": "9000"},
                {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "60"},
                {"name": "NCCL_SOCKET_IFNAME", "value": "ib0"},
            ],
        },
    },
    "settings": {"settings": {"quotas": '{"*": {"jobs": 2}}', "reconcile_seconds": 1, "backfill": False}},
    "global": {"global": {"storageClass": "fast"}},
    "GPUs": {
        "storage": RWX,
        "ray": {"workers": [{"name": "gpu", "replicas": 0, "cpu": "7500m", "memory": "64Gi", "gpu": 8}]},
    },
}


COPIES = {
    "dashboards": "deploy/grafana/dashboards",
    "alerts.yml": "deploy/prometheus/alerts.yml",
    # A template cannot read values.yaml itself.
    "values.yaml": "helm/trainshed/values.yaml",
}


@pytest.fixture(params=VARIANTS, scope="module")
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(VARIANTS[request.param])


def test_objects_are_accepted_by_the_api_schema(rendered: Rendered) -> None:
    found = {f"{one['kind']} {one['metadata']['name']}": problems(one) for one in rendered.objects}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len({(one["kind"], one["metadata"]["name"]) for one in rendered.objects}) == len(rendered.objects)


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


def test_notes_end_with_a_working_call() -> None:
    *_, forward, key, call = render().notes.strip().splitlines()
    assert forward == "kubectl port-forward --namespace ml service/demo-trainshed 8000:8000 &"
    assert "secret demo-trainshed-admin " in key
    assert call == 'curl -H "Authorization: Bearer $KEY" http://localhost:8000/jobs'
    for variant in ("ingress", "route", "route of the listener"):
        assert render(VARIANTS[variant]).notes.strip().splitlines()[-1].endswith("https://t.example/jobs"), variant


def test_callers_may_use_every_name_of_the_service() -> None:
    hosts = render(VARIANTS["ingress"]).of("ConfigMap", "demo-trainshed")["data"]["TRAINSHED_ALLOWED_HOSTS"].split(",")
    assert hosts[0] == "demo-trainshed"
    assert {"demo-trainshed.ml.svc", "t.example"} <= set(hosts)


def test_network_policies_allow_required_traffic() -> None:
    rendered = render(PRODUCTION)
    api = rendered.of("NetworkPolicy", "demo-trainshed-api")["spec"]
    assert [rule["ports"] for rule in api["ingress"]] == [[{"port": 8000}]]
    ports = [port["port"] for rule in api["egress"] for port in rule["ports"]]
    assert ports == [53, 53, 5353, 5353, 443, 8265, 5432]
    # User code runs in these pods, and must not reach the database.
    worker = rendered.of("NetworkPolicy", "demo-trainshed-allow-ray-worker")["spec"]
    assert 5432 not in [port["port"] for rule in worker["egress"] for port in rule.get("ports", [])], (
        "expected no access for user code"
    )
    head = rendered.of("NetworkPolicy", "demo-trainshed-allow-ray-head")["spec"]
    dashboard = next(rule for rule in head["ingress"] if rule.get("ports") == [{"port": 8265}])
    labels = next(pod for name, pod in rendered.pods() if name == "api")["metadata"]["labels"]
    assert dashboard["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


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


def test_pods_leave_a_lost_node_within_seconds(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        seconds = {one.get("key"): one.get("tolerationSeconds") for one in pod["spec"]["tolerations"]}
        assert {seconds[f"node.kubernetes.io/{taint}"] for taint in ("not-ready", "unreachable")} == {30}, name


def test_own_toleration_replaces_that_of_the_chart() -> None:
    own = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7}
    pod = render({"tolerations": [own], "storage": RWX}).of("Deployment")["spec"]["template"]["spec"]
    assert [one["tolerationSeconds"] for one in pod["tolerations"]] == [7, 30]


def test_strategy_owns_its_fields_so_that_it_can_be_changed() -> None:
    """A server-side apply keeps a `rollingUpdate` that the API server filled in, and then rejects Recreate."""
    rolling = render({"strategy": "RollingUpdate", "storage": RWX, **POSTGRES}).of("Deployment")["spec"]["strategy"]
    assert rolling == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert render().of("Deployment")["spec"]["strategy"] == {"type": "Recreate", "rollingUpdate": None}


def test_addresses_follow_the_ip_family() -> None:
    found = {
        family: (
            made.of("ConfigMap", "demo-trainshed")["data"]["TRAINSHED_HOST"],
            made.of("RayCluster")["spec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"],
            made.of("Service")["spec"].get("ipFamilyPolicy"),
        )
        for family, made in {one: render({"ipFamily": one}) for one in ("IPv4", "IPv6", "dual")}.items()
    }
    assert found == {
        "IPv4": ("0.0.0.0", "0.0.0.0", None),
        "IPv6": ("::", "::", "SingleStack"),
        "dual": ("::", "0.0.0.0", "PreferDualStack"),
    }


def test_controller_may_have_the_certificate() -> None:
    assert "tls" not in render(VARIANTS["TLS of the controller"]).of("Ingress")["spec"]
    assert "hostnames" not in render(VARIANTS["route of the listener"]).of("HTTPRoute")["spec"]


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


def test_head_alone_reaches_prometheus() -> None:
    rendered = render(PRODUCTION)
    ports = {
        name: [
            port["port"]
            for rule in rendered.of("NetworkPolicy", f"demo-trainshed-allow-ray-{name}")["spec"]["egress"]
            for port in rule.get("ports", [])
        ]
        for name in ("head", "worker")
    }
    assert 9090 in ports["head"]
    assert 9090 not in ports["worker"]


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


def test_parent_chart_decides_whether_this_one_is_rendered(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts/trainshed")
    depends = {"name": "trainshed", "version": "0.1.0", "condition": "trainshed.enabled"}
    about = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [depends]}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(about))
    own = {"enabled": True, "nodeSelector": None, "database": {"existingSecret": None}, "nameOverride": "t"}
    (parent / "values.yaml").write_text(yaml.safe_dump({"trainshed": own, "global": {"imageRegistry": "r.local"}}))
    made = render(chart=parent)
    assert made.of("Deployment")["metadata"]["name"] == "demo-t"
    assert made.of("Deployment")["spec"]["template"]["spec"]["containers"][0]["image"] == "r.local/trainshed:0.1.0"
    assert render({"trainshed": {"enabled": False}}, chart=parent).objects == ()


def test_disruption_budgets_never_keep_unready_pods() -> None:
    budget = render(VARIANTS["replicas"]).of("PodDisruptionBudget")["spec"]
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert render(VARIANTS["one node"]).of("PodDisruptionBudget")["spec"]["maxUnavailable"] == 0


def test_new_chart_version_keeps_the_ray_cluster(tmp_path: Path) -> None:
    """KubeRay replaces a cluster if anything but a replica count has changed."""
    pinned = {"image": {"tag": "a"}, "ray": {"image": {"tag": "a"}}}
    newer = tmp_path / "trainshed"
    shutil.copytree(CHART, newer)
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("0.1.0", "9.9.9"))
    assert render(pinned).of("RayCluster")["spec"] == render(pinned, chart=newer).of("RayCluster")["spec"]


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
