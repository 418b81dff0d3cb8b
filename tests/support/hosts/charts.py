"""The chart, rendered by Helm's own engine, and its objects."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.support.hosts.chart_rules import broken_rules

CHART = Path("helm/trainshed")
NAMESPACE = "ml"
CRDS = "TRAINSHED_TEST_CRDS"
"""Environment variable: a folder with KubeRay's resource definitions."""
_OTHERS = ("gateway.networking.k8s.io", "monitoring.coreos.com")
"""Groups without available definitions."""
Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """The objects that Helm would send to a cluster, and the notes that it would print."""

    objects: tuple[Object, ...]
    notes: str
    files: Mapping[str, str]

    def of(self, kind: str, name: str | None = None) -> Object:
        """Return the only object of a kind, or the one with a name."""
        found = [one for one in self.objects if one["kind"] == kind and name in (None, one["metadata"]["name"])]
        assert len(found) == 1, (kind, name, len(found))
        return found[0]

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Yield every pod and pod template, with its component."""
        for one in self.objects:
            if one["kind"] == "Pod":
                yield component(one), one
            elif one["kind"] == "Deployment":
                yield component(one["spec"]["template"]), one["spec"]["template"]
            elif one["kind"] == "RayCluster":
                yield "ray-head", one["spec"]["headGroupSpec"]["template"]
                for group in one["spec"]["workerGroupSpecs"]:
                    yield f"ray-worker {group['groupName']}", group["template"]


def component(one: Object) -> str:
    """Return the component label of an object."""
    return str(one["metadata"]["labels"].get("app.kubernetes.io/component", ""))


def render(values: Mapping[str, Any] | None = None, *, name: str = "demo", chart: Path = CHART) -> Rendered:
    """Render the chart as an install without a cluster does. Raises helm.HelmError."""
    with helm.Chart.load(str(chart)) as loaded:
        files = loaded.render(dict(values or {}), name=name, namespace=NAMESPACE)
    objects: list[Object] = []
    notes = ""
    for path, text in sorted(files.items()):
        if path.endswith("NOTES.txt"):
            notes = text
        else:
            objects += [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]
    return Rendered(tuple(objects), notes, files)


def in_parent_chart(folder: Path, values: Mapping[str, Any]) -> Path:
    """Copy the chart into a parent chart with these values, which has the usual condition. Return its folder."""
    shutil.copytree(CHART, folder / "charts/trainshed")
    depends = {"name": "trainshed", "version": "0.1.0", "condition": "trainshed.enabled"}
    about = {"apiVersion": "v2", "name": "parent", "version": "1.0.0", "dependencies": [depends]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(about))
    (folder / "values.yaml").write_text(yaml.safe_dump(dict(values)))
    return folder


def problems(one: Object) -> list[str]:
    """Return the problems that a Kubernetes API server would find in an object, including unknown fields."""
    return [*_schema_problems(one), *broken_rules(one)]


def _schema_problems(one: Object) -> list[str]:
    group = one["apiVersion"].partition("/")[0]
    if group in _OTHERS:
        return []
    if group == "ray.io":
        schema = ray_schema(one["kind"])
        errors = Draft202012Validator(schema).iter_errors(one) if schema else []
        return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
    problem = _kubernetes_problem(json.dumps(one))
    return [] if problem is None else [problem]


@cache
def _kubernetes_problem(text: str) -> str | None:
    """Return the problem of an object of Kubernetes' own. The chart's variants have most objects in common."""
    try:
        # Its schemas require strings where Kubernetes accepts numbers too.
        kubernetes_validate.validate(json.loads(text), "1.36", strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{error.path}: {error.message}"
    return None


# It would read its schemas, of megabytes, for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def ray_schema(kind: str) -> Object | None:
    """Return KubeRay's definition of a kind, with unknown fields forbidden; None if it is not available."""
    folder = os.environ.get(CRDS)
    if not folder:
        return None
    definition = yaml.safe_load((Path(folder) / f"ray.io_{kind.lower()}s.yaml").read_text())
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    schema: Object = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _strict(schema: Any) -> Any:
    """Return the definition with unknown fields forbidden and with Kubernetes' int-or-string."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {name: _strict(value) for name, value in schema.items()}
    if "properties" in schema and isinstance(schema["properties"], dict):
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    return made
