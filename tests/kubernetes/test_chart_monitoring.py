"""Objects of the Prometheus operator and of Grafana in the chart."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hosts.charts import render

MONITORING: dict[str, Any] = {
    "monitoring": {
        "podMonitor": True,
        "rules": True,
        "interval": "15s",
        "relabelings": [{"targetLabel": "region", "replacement": "eu"}],
    },
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
}


def test_ray_dashboards_find_every_series() -> None:
    monitor = render(MONITORING).of("PodMonitor")
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert [one["port"] for one in endpoints] == ["metrics", "as-metrics", "dash-metrics"]
    for one in endpoints:
        assert [rule["targetLabel"] for rule in one["relabelings"]] == ["ray_io_cluster", "region"]
        assert one["interval"] == "15s"


def test_release_has_a_rule_of_its_own() -> None:
    rules = render(MONITORING).of("PrometheusRule")["spec"]["groups"]
    general = yaml.safe_load(Path("deploy/prometheus/alerts.yml").read_text())["groups"][0]
    assert [one["alert"] for one in rules[0]["rules"]] == [one["alert"] for one in general["rules"]]
    assert rules[1]["rules"][0]["expr"] == 'absent(trainshed_build_info{namespace="ml", service="demo-trainshed"})'


def rules_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return the alert rules of a release, by alert; the release's own rule of a name comes last and stays."""
    made = render({**values, "monitoring": {"rules": True, **values.get("monitoring", {})}})
    return {rule["alert"]: rule for group in made.of("PrometheusRule")["spec"]["groups"] for rule in group["rules"]}


def test_rules_watch_only_objects_of_the_release() -> None:
    """Containers of every RayCluster are called ray-head and ray-worker, and claims may have any name."""
    own = rules_of({"fullnameOverride": "ml", "storage": {"volume": {"existingClaim": "mine"}}})
    texts = {name: rule["expr"] for name, rule in own.items()}
    assert not any(".*trainshed" in text for name, text in texts.items() if name != "TrainshedCertificateExpires")
    assert 'persistentvolumeclaim=~"ml-home|mine"' in texts["TrainshedVolumeFull"]
    assert 'pod=~"ml-.*"' in texts["TrainshedGpuHot"]
    assert "< 3 and" in texts["TrainshedRayPodsMissing"]


def test_dashboards_link_to_the_dashboard_of_ray() -> None:
    values = {"monitoring": {"dashboards": True}, "ray": {"dashboardUrl": "https://ray.example/"}}
    made = json.loads(render(values).of("ConfigMap", "demo-trainshed-dashboards")["data"]["trainshed-job.json"])
    assert [one["query"] for one in made["templating"]["list"] if one["name"] == "ray"] == ["https://ray.example"]


def test_runbook_url_needs_a_base() -> None:
    assert not any("runbook_url" in rule["annotations"] for rule in rules_of({}).values())
    rules = rules_of({"monitoring": {"runbookUrl": "https://git.example/main/"}}).values()
    for rule in rules:
        found, page = rule["annotations"].get("runbook_url"), rule["annotations"].get("runbook")
        assert found == (page and f"https://git.example/main/{page}")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian: prometheus)")
def test_rules_of_a_release_fire_as_expected(tmp_path: Path) -> None:
    values = {"ingress": {"enabled": True, "host": "t.example", "tlsSecret": "tls"}, "fullnameOverride": "ml"}
    own = rules_of(values)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "own", "rules": [*own.values()]}]}))
    ready = 'kube_pod_status_ready{namespace="ml", condition="true", pod="'
    series = {f'{ready}ml-ray-head-1"}}': "1x200", f'{ready}other"}}': "1x200"}
    series |= {
        'certmanager_certificate_expiration_timestamp_seconds{namespace="ml", name="tls"}': "9e9x200",
        'probe_ssl_earliest_cert_expiry{instance="https://t.example/healthz"}': "604000x200",
        'probe_ssl_earliest_cert_expiry{instance="https://txexample"}': "0x200",
    }
    expected = [f'{{alertname="Trainshed{one}"}}' for one in ("CertificateExpires", "RayPodsMissing", "ReleaseGone")]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": value} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing", alertname!="TrainshedDown"})',
                "eval_time": "90m",
                "exp_samples": [{"labels": labels, "value": 1} for labels in expected],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
