"""Values of the chart: one variant for each of its features."""

from typing import Any

import yaml

from tests.support.hosts.charts import CHART

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
