"""A search over several values at once: objects that a cluster accepts, or a refusal that names the value."""

import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.test_any_values import FULL, OWN_RAY, attempt, objects, replace
from tests.support.builders.searches import seeds
from tests.support.hosts.charts import in_parent_chart, problems, render

RWX: dict[str, Any] = {"storage": {"volume": {"accessMode": "ReadWriteMany"}}}
TOLERATIONS: tuple[Any, ...] = (
    *([], [{"key": "a"}], [{"operator": "Exists"}], [{"key": "a", "operator": "Equal", "value": "1"}]),
    [{"key": "b", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 3}],
    *([{"key": one, "operator": "Exists"} for one in order] for order in ("ab", "ba")),
)
LABELS: tuple[Any, ...] = ({}, {"a": "b"}, {"a": "true"}, {"kubernetes.io/hostname": "1"}, {"x/y": ""}, {"a": None})
AMOUNTS: tuple[Any, ...] = (
    *({}, {"cpu": "1"}, {"cpu": 0.1}, {"cpu": "0"}, {"memory": "1Gi"}, {"memory": 1e9}, {"memory": "64Mi"}),
    *({"ephemeral-storage": "100Gi"}, {"ephemeral-storage": "1Mi"}, {"nvidia.com/gpu": 1}, {"hugepages-2Mi": "4Mi"}),
)
SIZES = ("1Gi", "1", "0.5Gi", 100, 1.5, "1Ti", "500m", "010Mi", "1e3", "0")
NAMES = ("", "a", "a.b", "1", "true", "null", "0x1", "on", "x" * 64, "x" * 253)
GATES: tuple[Any, ...] = ([], [{"name": "a/b"}], [{"name": "a"}, {"name": "a"}])
SOURCES: tuple[Any, ...] = (
    *({"fieldRef": {"fieldPath": one}} for one in ("metadata.name", "status.podIP", "x")),
    *({"resourceFieldRef": {"resource": one}} for one in ("limits.cpu", "x")),
    {"secretKeyRef": {"name": "a", "key": "b"}},
)
ENVIRONMENTS: tuple[Any, ...] = (
    *([{"name": one, "value": "x"}] for one in ("A", "PATH", "PGPASSWORD", "NCCL_SOCKET_IFNAME", "RAY_AUTH_TOKEN")),
    *([{"name": "A", "valueFrom": one}] for one in SOURCES),
    *([{"name": "A"}], [{"name": "A"}] * 2),
)
EXPRESSIONS = ({"operator": "In"}, {"operator": "In", "values": ["x"]}, {"operator": "Exists", "values": ["x"]})
BLOCKS: tuple[Any, ...] = (
    *({"cidr": one} for one in ("10.0.0.0/8", "999.0.0.0/8", "10.0.0.0/40", "::/0", "1:2/64")),
    *({"cidr": "10.0.0.0/8", "except": [one]} for one in ("11.0.0.0/16", "10.1.0.0/16", "10.0.0.0/8", "fd00::/16")),
)
PEERS: tuple[Any, ...] = (
    *([], [{"podSelector": {}}], [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]),
    *([{"podSelector": {"matchExpressions": [{"key": "a", **one}]}}] for one in EXPRESSIONS),
    *([{"ipBlock": one}] for one in BLOCKS),
)
PORTS: tuple[Any, ...] = ({}, {"port": 1}, {"port": "http"}, {"port": "1"}, {"port": "a--b"}, {"port": 9, "endPort": 5})
EGRESS: tuple[Any, ...] = (*([{"to": one}] for one in PEERS), *([{"ports": [one]}] for one in PORTS))
HOSTS: tuple[Any, ...] = ([], ["t.example"], ["10.0.0.1"], ["a"] * 17, ["*.x"])
URLS = ("", "http://p:9090", "https://p.example", "https://p.example:443/x", "https://p.ns.svc")
IMAGES: tuple[Any, ...] = (
    *({"repository": one} for one in ("a:1", "h:5000/a", "a/", "a//b", "a..b", "a-", "R.io/a")),
    *({"registry": one} for one in ("http://r", "r.io/x/", "/", "[::1]:5000", ":5000", "R.io")),
    *({"tag": "1@sha256:ab"}, {"digest": f"sha256:{'a' * 64}"}),
)
WORKERS: tuple[Any, ...] = tuple(
    [{"name": "a", "replicas": 1, "cpu": 1, "memory": "2Gi", **one}]
    for one in ({}, {"cpu": 0.5}, {"gpu": 8}, {"tolerations": TOLERATIONS[1]}, {"gpu": None}, {"memory": 3e9})
)
DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tolerations", "ray.head.tolerations"), TOLERATIONS),
    **dict.fromkeys(("nodeSelector", "ray.head.nodeSelector", "home.selector", "monitoring.labels"), LABELS),
    **{f"{where}.{kind}": AMOUNTS for where in ("resources", "ray.head.resources") for kind in ("requests", "limits")},
    **dict.fromkeys(("tmp.limit", "tmp.request", "ray.tmp.limit", "ray.tmp.request", "storage.volume.size"), SIZES),
    **dict.fromkeys(("database.existingSecret", "adminKey.existingSecret", "ray.tokenSecret"), NAMES),
    **dict.fromkeys(("storage.volume.existingClaim", "ingress.className", "nameOverride", "fullnameOverride"), NAMES),
    **dict.fromkeys(("env", "ray.env"), ENVIRONMENTS),
    **dict.fromkeys(("networkPolicy.ingressFrom", "networkPolicy.metricsFrom"), PEERS),
    **dict.fromkeys(("networkPolicy.egress", "networkPolicy.rayEgress", "networkPolicy.headEgress"), EGRESS),
    **dict.fromkeys(("allowedHosts", "httpRoute.hostnames"), HOSTS),
    **dict.fromkeys(("monitoring.prometheusUrl", "monitoring.grafanaUrl"), URLS),
    **dict.fromkeys(("image", "ray.image"), IMAGES),
    **dict.fromkeys(("networkPolicy.enabled", "ingress.enabled", "httpRoute.enabled", "ray.create"), (True, False)),
    **dict.fromkeys(("monitoring.podMonitor", "monitoring.serviceMonitor", "ray.head.pdb"), (True, False)),
    **dict.fromkeys(("ray.drainSeconds", "nodeLossSeconds"), (0, 1, 2147483647)),
    "ray.workers": WORKERS,
    "ray.head.schedulingGates": GATES,
    "ray.address": ("", "http://h:8265", "https://h", "http://[::1]:8265", "http://h:99999"),
    "ingress.host": ("", "t.example", "10.0.0.1", "1"),
    "httpRoute.parentRefs": ([{"name": "g"}], [{"name": "g"}] * 2, []),
    "imagePullSecrets": (["a"], ["a", {"name": "a"}], [{"name": "b"}]),
    "trustedProxies": (["*"], ["999.1.1.1"], ["10.0.0.0/99"], ["fe80::/10"]),
    "storage.roots": ([], ["s3://a"], {"*": ["s3://a"]}, {"a": None}),
    "replicas": (0, 1, 3),
    "strategy": ("Recreate", "RollingUpdate"),
    "ipFamily": ("IPv4", "IPv6", "dual"),
    "storage.volume.accessMode": ("ReadWriteOnce", "ReadWriteMany"),
    "storage.volume.singleNode": (True, False),
    "monitoring.scrapeTimeout": ("", "10s", "1h"),
    "global": ({"imageRegistry": "r:5000"}, {"imageRegistry": "http://r"}, {"x": {"y": 1}}, None),
}
NAMES_OF_RELEASES = ("demo", "demo", "demo", "trainshed", "on", "1a", "a.b", "n" * 36, "n" * 53)


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return one to four random values over a base."""
    values = deepcopy(draw.choice(({}, RWX, FULL, OWN_RAY)))
    for _ in range(draw.randint(1, 4)):
        path = draw.choice(list(DRAWN))
        values = replace(values, tuple(path.split(".")), draw.choice((*DRAWN[path], None)))
    return values


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a chart that contains this one."""
    return in_parent_chart(tmp_path_factory.mktemp("charts") / "parent", {})


@pytest.mark.parametrize("seed", range(seeds(20, more=3000)))
def test_values_together_render_valid_objects_or_are_refused(seed: int, parent: Path) -> None:
    draw = random.Random(seed)
    values, name = drawn(draw), draw.choice(NAMES_OF_RELEASES)
    made = attempt(values, name=name)
    if isinstance(made, str):
        return
    wrong = [f"{one['kind']} {one['metadata']['name']}{problem}" for one in made.objects for problem in problems(one)]
    assert wrong == [], (name, values)
    if seed % 5 == 0:
        own = {name: value for name, value in values.items() if name != "global"}
        inside = {"trainshed": own, "global": values.get("global")}
        assert objects(render(inside, name=name, chart=parent)) == objects(made), values
