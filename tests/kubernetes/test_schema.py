"""The schema of the chart's values: wrong types and forms are refused by name, and every value has a comment."""

import json
import re
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from tests.support.hosts.chart_settings import settings_schema
from tests.support.hosts.charts import CHART, render

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


def test_values_of_the_docs_render() -> None:
    page = Path("docs/operate/kubernetes.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.+?)```", page, re.DOTALL)]
    assert len(blocks) >= 3
    for block in blocks:
        assert render(block).of("Deployment")
    inline = re.findall(r"`((?:settings|env|tolerations|imagePullSecrets|storage|ray|image): [\[{].+?)`", page)
    assert inline
    for text in inline:
        render(yaml.safe_load(text))


def test_values_are_few_and_commented() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    assert len(lines) <= 260
    for line, before in zip(lines[1:], lines[:-1], strict=True):
        if re.match(r" *(- )?[A-Za-z]\w*: *[^ #]", line):
            assert "#" in line or before.lstrip().startswith("#"), f"no comment: {line}"
