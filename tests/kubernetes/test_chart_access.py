"""Access to the service and to Ray: host names, notes, addresses and network policies."""

from tests.support.hosts.chart_variants import PRODUCTION, VARIANTS
from tests.support.hosts.charts import render


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
