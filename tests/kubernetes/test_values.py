"""Values of the chart that contradict each other: the guard that refuses them, and its remedy."""

import re
from functools import cache
from typing import Any

import helm_python as helm
import pytest

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
        {"networkPolicy": {"ingressFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]}},
        "networkPolicy.ingressFrom: except 11.0.0.0/16 is not a part of cidr",
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


@pytest.mark.parametrize("number", range(len(GUARDS)), ids=[message for _, message in GUARDS])
def test_contradictory_values_are_rejected_with_the_remedy(number: int) -> None:
    assert GUARDS[number][1] in refused(number)


@cache
def refused(number: int) -> str:
    """Return the message with which the chart refuses a case of GUARDS."""
    return refusal(GUARDS[number][0])


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
    "variables without secrets": {
        "env": [
            {"name": "MAX_TOKEN", "value": "5"},
            {"name": "TOKENIZERS_PARALLELISM", "value": "true"},
            {"name": "HTTPS_PROXY", "value": "http://proxy.example:3128"},
            {"name": "SSL_CLIENT_PRIVATE_KEY", "value": "/etc/key.pem"},
            {"name": "NO_PROXY", "value": "a@b,10.0.0.0/8"},
            {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "PROXY_PASSWORD", "value": "$(PASSWORD)"},
            {"name": "HTTP_PROXY", "value": "http://me:$(PASSWORD)@proxy.example"},
        ]
    },
    "networks with exceptions": {
        "networkPolicy": {
            "metricsFrom": [{"ipBlock": {"cidr": "10.8.0.0/13", "except": ["10.9.0.0/16", "10.15.255.255/32"]}}],
            "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}}]}],
            "rayEgress": [{"to": [{"ipBlock": {"cidr": "fd00::/8", "except": ["fd00:1::/32"]}}]}],
        }
    },
    "devices with limits": {"ray": {"head": {"resources": {"limits": {"rdma/hca": 1}}}}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_valid_values_are_not_refused(name: str) -> None:
    render(ACCEPTED[name])


def test_every_guard_has_a_case() -> None:
    errors = [*map(refused, range(len(GUARDS))), refusal({}, name="1demo"), refusal({}, name="n" * 38)]
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
