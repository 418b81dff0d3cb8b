"""Values of the chart: rejected ones, the rejecting guard, and the remedy."""

import json
import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.hosts.chart_settings import settings_schema
from tests.support.hosts.charts import CHART, render

RWX = {"volume": {"accessMode": "ReadWriteMany"}}
POSTGRES = {"database": {"existingSecret": "db"}, "networkPolicy": {"egress": [{"ports": [{"port": 5432}]}]}}
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists"}
GUARDS: list[tuple[dict[str, Any], str]] = [
    ({"replicas": 2}, "set database.existingSecret, or replicas: 1"),
    ({"strategy": "RollingUpdate"}, "or strategy: Recreate"),
    ({"replicas": 2, **POSTGRES}, "set storage.volume.accessMode to ReadWriteMany"),
    (
        {"ray": {"workers": [{"name": n, "replicas": 1, "cpu": 1, "memory": "1Gi"} for n in ("a", "b")]}},
        "keep one group, or set storage.volume.singleNode: true",
    ),
    ({"ray": {"address": "http://ray:8265", "tokenSecret": "t"}}, "leave ray.address empty, or set ray.create: false"),
    ({"ray": {"create": False}}, "set ray.create: true, or ray.address"),
    ({"ray": {"create": False, "address": "http://ray:8265"}}, "ray.address needs ray.tokenSecret"),
    (
        {"ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "t"}},
        "needs storage.volume.existingClaim with accessMode ReadWriteMany",
    ),
    (
        {"ray": {"workers": [{"name": "gpu", "replicas": 1, "cpu": 1, "memory": "1Gi", "gpu": 1}]}},
        "give nodeSelector, ray.head.nodeSelector and that of the workers the same labels",
    ),
    (
        {"ray": {"workers": [{"name": "gpu", "replicas": 1, "cpu": 1, "memory": "1Gi", "tolerations": [GPU_TAINT]}]}},
        "give tolerations, ray.head.tolerations and those of the workers the same entries",
    ),
    (
        {
            "storage": {"volume": {"singleNode": True}},
            "tolerations": [GPU_TAINT],
            "ray": {
                "workers": [
                    {"name": "g", "replicas": 1, "cpu": 1, "memory": "1Gi", "gpu": 8, "tolerations": [GPU_TAINT]}
                ]
            },
        },
        "give tolerations, ray.head.tolerations and those of the workers the same entries",
    ),
    ({"settings": {"preflight_checks": 64}}, "exceeds resources.limits.memory 2Gi: raise the limit"),
    ({"resources": {"requests": {"memory": "3Gi"}}}, "resources.requests.memory 3Gi exceeds its limit 2Gi"),
    (
        {"ray": {"head": {"resources": {"requests": {"memory": "4097Mi"}}}}},
        "ray.head.resources.requests.memory 4097Mi exceeds its limit 4Gi",
    ),
    (
        {"ray": {"env": [{"name": "AWS_SECRET_ACCESS_KEY", "value": "x"}]}},
        "ray.env.AWS_SECRET_ACCESS_KEY has its secret in plain text",
    ),
    ({"env": [{"name": "WANDB_API_KEY", "value": "x"}]}, "use valueFrom with a Secret"),
    ({"ray": {"workers": [{"name": "a", "replicas": 1, "cpu": 1, "memory": "64Mi"}]}}, "set at least 1Gi"),
    ({"tmp": {"request": "3Gi"}}, "tmp.request 3Gi exceeds tmp.limit 2Gi"),
    ({"ray": {"tmp": {"limit": "500Mi"}}}, "ray.tmp.request 1Gi exceeds ray.tmp.limit 500Mi"),
    ({"resources": {"requests": {"nvidia.com/gpu": 1}}}, "leave it out of requests"),
    ({"resources": {"requests": {"ephemeral-storage": "3Gi"}}}, "ephemeral-storage 3Gi exceeds its limit 2Gi"),
    (
        {"ray": {"head": {"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "1Mi"}}}}},
        "set at least 1Gi",
    ),
    ({"env": [{"name": "PGPASSWORD", "value": "x"}]}, "env.PGPASSWORD has its secret in plain text"),
    ({"ray": {"env": [{"name": "HTTPS_PROXY", "value": "http://me:x@p:1"}]}}, "ray.env.HTTPS_PROXY has its secret"),
    (
        {"networkPolicy": {"rayEgress": [{"ports": [{"port": 20, "endPort": 10}]}]}},
        "networkPolicy.rayEgress: endPort 10 is lower than port 20",
    ),
    (
        {
            "storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}},
            "ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "t"},
            "monitoring": {"podMonitor": True},
        },
        "set podMonitor: false, and scrape that cluster yourself",
    ),
    ({"monitoring": {"interval": "30s", "scrapeTimeout": "1m"}}, "scrapeTimeout 1m exceeds interval 30s"),
    ({"enabled": False}, "to stop the service, set replicas: 0"),
    ({"user": {"gid": None}}, "must both be set or both be null"),
    ({"monitoring": {"podMonitor": True}}, "all scrapes of Ray are blocked"),
    (
        {
            "monitoring": {"podMonitor": True},
            "networkPolicy": {"metricsFrom": [{"podSelector": {}}]},
            "ipFamily": "IPv6",
        },
        "because Ray exports its series over IPv4",
    ),
    (
        {"monitoring": {"serviceMonitor": True}, "networkPolicy": {"ingressFrom": [{"podSelector": {}}]}},
        "all scrapes of the service are blocked",
    ),
    ({"monitoring": {"prometheusUrl": "http://p:9090"}}, "set networkPolicy.headEgress"),
    ({"env": [{"name": "RAY_AUTH_TOKEN", "value": "x"}]}, "occurs twice or is set by the chart"),
    ({"ray": {"env": [{"name": "A", "value": "x"}] * 2}}, "ray.env has A, which occurs twice"),
    ({"ray": {"image": {"tag": "0.0.9"}}}, "or set ray.allowVersionSkew: true"),
    ({"ingress": {"enabled": True, "tlsSecret": "tls"}}, "ingress.enabled needs ingress.host"),
    ({"ingress": {"enabled": True, "host": "t.example"}}, "set ingress.tls: controller"),
    (
        {"ingress": {"enabled": True, "host": "t.example", "tls": "controller", "tlsSecret": "t"}},
        "set ingress.tls: secret, or leave tlsSecret empty",
    ),
    ({"ingress": {"enabled": True, "host": "t.example/trainshed", "tlsSecret": "tls"}}, "use a separate host name"),
    ({"httpRoute": {"enabled": True}}, "httpRoute.enabled needs httpRoute.parentRefs"),
    ({"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]}}, "or allowedHosts with the host names"),
    ({"database": {"existingSecret": "db"}}, "set networkPolicy.egress"),
    (
        {"storage": RWX, "ray": {"workers": [{"name": "a", "replicas": 1, "cpu": 1, "memory": "1Gi"}] * 2}},
        "give each a unique name",
    ),
    ({"settings": {"runs": "s3://x"}}, "TRAINSHED_RUNS is set by the chart, or is a secret"),
]


@pytest.mark.parametrize(("values", "message"), GUARDS, ids=[message for _, message in GUARDS])
def test_contradictory_values_are_rejected_with_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        render(values)


TAINTS = [GPU_TAINT, {"key": "team", "operator": "Exists"}]
WORKER = {"name": "cpu", "replicas": 1, "cpu": 1, "memory": "2Gi"}
LOST = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
ACCEPTED: dict[str, dict[str, Any]] = {
    "the same tolerations in another order": {
        "tolerations": TAINTS,
        "ray": {"head": {"tolerations": TAINTS[::-1]}, "workers": [{**WORKER, "tolerations": TAINTS}]},
    },
    "another time on a lost node": {"tolerations": [LOST]},
    "Prometheus and Grafana at port 443": {
        "monitoring": {"prometheusUrl": "https://p.example/x", "grafanaUrl": "https://g.example:443"}
    },
    "variables that are no secrets": {
        "env": [
            {"name": "MAX_TOKEN", "value": "5"},
            {"name": "TOKENIZERS_PARALLELISM", "value": "true"},
            {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
            {"name": "SSL_CLIENT_PRIVATE_KEY", "value": "/etc/key.pem"},
            {"name": "NO_PROXY", "value": "a@b,10.0.0.0/8"},
        ]
    },
    "devices with limits": {"ray": {"head": {"resources": {"limits": {"rdma/hca": 1}}}}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_valid_values_are_not_refused(name: str) -> None:
    render(ACCEPTED[name])


def test_every_guard_has_a_case() -> None:
    cases = [({**values}, "demo") for values, _ in GUARDS]
    cases += [({}, "1demo"), ({}, "n" * 38)]
    errors = [refusal(values, name=name) for values, name in cases]
    unused = [text for text in guards() if not any(re.search(text, error) for error in errors)]
    # A cluster without KubeRay cannot be simulated here: a plain render must pass.
    assert [text for text in unused if "not installed in this cluster" not in text.replace("\\", "")] == []


def guards() -> list[str]:
    """Return the message of every guard, as a regular expression."""
    text = "".join(file.read_text() for file in sorted((CHART / "templates").glob("_guards*.tpl")))
    messages = re.findall(r'fail (?:\(printf )?"((?:[^"\\]|\\.)+)"', text)
    assert len(messages) == text.count("fail ")
    return [re.sub("%[a-z]", ".+", re.escape(message)) for message in messages]


def refusal(values: dict[str, Any], *, name: str = "demo") -> str:
    """Return the message with which the chart refuses values."""
    with pytest.raises(helm.HelmError) as error:
        render(values, name=name)
    return str(error.value)


def test_long_names_have_remedies() -> None:
    own = {
        "storage": {"volume": {"existingClaim": "mine", "accessMode": "ReadWriteMany"}},
        "ray": {"create": False, "address": "http://ray:8265", "tokenSecret": "token"},
    }
    for values, name in (({}, "1demo"), ({}, "my.release"), ({**own, "nameOverride": "m" * 40}, "n" * 45)):
        assert "choose another release name, or set fullnameOverride" in refusal(values, name=name)
    assert "choose a shorter release name, or set fullnameOverride" in refusal({}, name="n" * 38)
    assert render(name="n" * 36).of("RayCluster")["metadata"]["name"] == f"{'n' * 36}-trainshed-ray"
    assert render({"fullnameOverride": "short"}, name="n" * 38).of("RayCluster")["metadata"]["name"] == "short-ray"
    for name, expected in (("demo", "demo-ml"), ("demo-ml", "demo-ml")):
        assert render({"nameOverride": "ml"}, name=name).of("Service")["metadata"]["name"] == expected
    assert render(own, name="n" * 45).of("Service")["metadata"]["name"] == f"{'n' * 45}-trainshed"


SCHEMA: list[tuple[dict[str, Any], str]] = [
    ({"replica": 3}, "additional properties 'replica' not allowed"),
    ({"ray": {"worker": []}}, "additional properties 'worker' not allowed"),
    ({"replicas": -1}, "/replicas"),
    ({"strategy": "Rolling"}, "/strategy"),
    ({"storage": {"runs": "file:///srv"}}, "/storage/runs"),
    ({"storage": {"runs": "bucket/runs"}}, "/storage/runs"),
    ({"storage": {"volume": {"accessMode": "RWX"}}}, "/storage/volume/accessMode"),
    ({"home": {"size": "5 GB"}}, "/home/size"),
    ({"settings": {"qotas": "{}"}}, "at '/settings': additional properties 'qotas' not allowed"),
    ({"ray": {"address": "ray:10001"}}, "/ray/address"),
    ({"ray": {"version": "2.60"}}, "/ray/version"),
    ({"ray": {"workers": []}}, "/ray/workers"),
    ({"ray": {"workers": [{"name": "GPU", "replicas": 1, "cpu": 1, "memory": "1Gi"}]}}, "/ray/workers/0/name"),
    ({"user": {"uid": 0}}, "/user/uid"),
    ({"ray": {"env": [{"name": "X", "value": 1}]}}, "/ray/env/0/value"),
    ({"ray": {"env": [{"name": "X", "valu": "1"}]}}, "additional properties 'valu' not allowed"),
    ({"ingress": {"host": "*.example"}}, "/ingress/host"),
    ({"httpRoute": {"hostnames": ["*.example"]}}, "/httpRoute/hostnames/0"),
    ({"image": {"pullPolicy": "always"}}, "/image/pullPolicy"),
    ({"pdb": "yes"}, "/pdb"),
    ({"image": {"repository": "r@sha256:a"}}, "/image/repository"),
    ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    ({"imagePullSecrets": [{"nam": "x"}]}, "/imagePullSecrets/0"),
    ({"ipFamily": "IPv5"}, "/ipFamily"),
    ({"settings": {"runs": {"a": 1}}}, "/settings/runs"),
    ({"ray": {"workers": [{"name": "head", "replicas": 1, "cpu": 1, "memory": "1Gi"}]}}, "/ray/workers/0/name"),
    ({"enabled": "yes"}, "/enabled"),
    ({"settings": {"reconcile_seconds": 0}}, "/settings/reconcile_seconds"),
    ({"settings": {"preflight_checks": "many"}}, "/settings/preflight_checks"),
    ({"settings": {"sinks": [1]}}, "/settings/sinks/0"),
    ({"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 7}]}, "missing property 'effect'"),
    ({"tolerations": [{"ky": "a", "operator": "Exists"}]}, "at '/tolerations/0': additional properties 'ky'"),
    ({"nodeSelector": {"a b": "x"}}, "at '/nodeSelector': additional properties 'a b' not allowed"),
    ({"networkPolicy": {"egress": [{"port": 5432}]}}, "at '/networkPolicy/egress/0': additional properties 'port'"),
    ({"networkPolicy": {"ingressFrom": [{}]}}, "/networkPolicy/ingressFrom/0"),
    ({"env": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "f"}}}]}, "/env/0"),
    ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}]}, "/env/0/valueFrom/secretKeyRef"),
    ({"home": {"size": 0}}, "/home/size"),
    ({"storage": {"volume": {"size": "0Gi"}}}, "/storage/volume/size"),
    ({"database": {"existingSecret": "a..b"}}, "/database/existingSecret"),
    ({"storage": {"roots": ["s3://a,s3://b"]}}, "/storage/roots"),
    ({"image": {"repository": "trainshed:1.0"}}, "/image/repository"),
    ({"image": {"registry": "https://images.example"}}, "/image/registry"),
    ({"global": {"imageRegistry": "https://images.example"}}, "/global/imageRegistry"),
    ({"image": {"tag": "1@sha256:abc"}}, "/image/tag"),
    ({"ingress": {"host": "10.0.0.1"}}, "/ingress/host"),
    ({"httpRoute": {"hostnames": ["10.0.0.1"]}}, "/httpRoute/hostnames/0"),
    ({"httpRoute": {"parentRefs": [{"name": "g"}] * 2}}, "/httpRoute/parentRefs"),
    ({"trustedProxies": ["10.0.0.300"]}, "/trustedProxies/0"),
    ({"networkPolicy": {"ingressFrom": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}}, "/ipBlock/cidr"),
    (
        {"networkPolicy": {"ingressFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}},
        "missing property 'values'",
    ),
    ({"networkPolicy": {"egress": [{"ports": [{"port": "5432"}]}]}}, "/networkPolicy/egress/0/ports/0/port"),
    ({"ray": {"head": {"schedulingGates": [{"name": "a"}] * 2}}}, "/ray/head/schedulingGates"),
    ({"ray": {"address": "http://ray:99999"}}, "/ray/address"),
    ({"resources": {"limits": {"nvidia.com/gpu": "500m"}}}, "/resources/limits/nvidia.com~1gpu"),
    ({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.node"}}}]}, "/env/0/valueFrom/fieldRef"),
    (
        {"env": [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "cpu"}}}]},
        "/env/0/valueFrom/resourceField",
    ),
    ({"settings": {"preflight_checks": "-4"}}, "/settings/preflight_checks"),
]


@pytest.mark.parametrize(("values", "message"), SCHEMA, ids=[message for _, message in SCHEMA])
def test_values_of_the_wrong_type_are_rejected_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=re.escape(message)):
        render(values)


def test_schema_covers_all_settings_and_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["properties"]["settings"]["properties"] == settings_schema()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() == values.keys()
    for name, reference in schema["properties"].items():
        section = schema["definitions"][reference["$ref"].rsplit("/")[-1]] if "$ref" in reference else reference
        if name != "settings" and "properties" in section and section.get("additionalProperties") is False:
            assert section["properties"].keys() == values[name].keys(), name


def test_docs_name_only_values_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def known(names: list[str]) -> bool:
        here = schema
        for name in names:
            while "$ref" in here:
                here = schema["definitions"][here["$ref"].rsplit("/")[-1]]
            if "properties" not in here:
                return True
            if name not in here["properties"]:
                return False
            here = here["properties"][name]
        return True

    sections = "|".join(schema["properties"])
    pattern = re.compile(rf"(?:`|--set |,)((?:{sections})(?:\.\w+)+)(?=[`:=])")
    pages = [Path(f"docs/operate/{name}.md").read_text() for name in ("kubernetes", "monitoring", "runbook")]
    found = {name for page in pages for name in pattern.findall(page)}
    assert len(found) > 25
    # Files of Compose.
    assert sorted(name for name in found if not known(name.split("."))) == ["database.env", "ray.token"]


def test_values_are_few_and_commented() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert len(lines) <= 260
    for line, before in zip(lines[1:], lines[:-1], strict=True):
        if re.match(r" *(- )?[A-Za-z]\w*: *[^ #]", line):
            assert "#" in line or before.lstrip().startswith("#"), f"no comment: {line}"
