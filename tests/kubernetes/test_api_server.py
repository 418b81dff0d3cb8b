"""The chart on a real API server: install into a restricted namespace, upgrade, and uninstall."""

from collections.abc import Iterator

import helm_python as helm
import pytest

from tests.support.hosts.api_server import ApiServer, api_server, why_no_api_server
from tests.support.hosts.charts import CHART, NAMESPACE, render

pytestmark = [
    pytest.mark.skipif((why := why_no_api_server()) is not None, reason=str(why)),
    pytest.mark.timeout(180),
]
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with api_server() as made:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": RESTRICTED}}
        made.apply(namespace).raise_for_status()
        yield made


def test_server_accepts_every_object_and_rejects_unknown_fields(server: ApiServer) -> None:
    rendered = render()
    for one in rendered.objects:
        answer = server.apply(one, namespace=NAMESPACE, dry_run=True)
        assert answer.is_success, answer.text
    service = rendered.of("Service")
    service["spec"]["selektor"] = {}
    assert "selektor" in server.apply(service, namespace=NAMESPACE, dry_run=True).text


def test_restricted_namespace_accepts_every_pod(server: ApiServer) -> None:
    for name, template in render().pods():
        metadata = {**template["metadata"], "name": name.replace(" ", "-")}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        answer = server.apply(pod, namespace=NAMESPACE, dry_run=True)
        assert answer.is_success, answer.text
        pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        assert server.apply(pod, namespace=NAMESPACE, dry_run=True).status_code == 403


def test_upgrade_keeps_keys_and_uninstall_keeps_volumes(server: ApiServer) -> None:
    with helm.Config(kubeconfig_path=server.kubeconfig, namespace=NAMESPACE) as config:
        config.install(str(CHART), "demo", {})
        before = server.get("Secret", "demo-trainshed-admin", namespace=NAMESPACE).raise_for_status().json()["data"]
        config.upgrade(str(CHART), "demo", {"ray": {"drainSeconds": 60}})
        after = server.get("Secret", "demo-trainshed-admin", namespace=NAMESPACE).raise_for_status().json()["data"]
        assert before == after
        cluster = server.get("RayCluster", "demo-trainshed-ray", api="ray.io/v1", namespace=NAMESPACE).json()
        template = cluster["spec"]["headGroupSpec"]["template"]
        assert template["spec"]["terminationGracePeriodSeconds"] == 75
        config.uninstall("demo")
    assert server.get("Service", "demo-trainshed", namespace=NAMESPACE).status_code == 404
    for kind, name in (("PersistentVolumeClaim", "demo-trainshed-storage"), ("Secret", "demo-trainshed-admin")):
        assert server.get(kind, name, namespace=NAMESPACE).is_success, name
