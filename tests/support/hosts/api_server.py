"""A Kubernetes API server without nodes: etcd and kube-apiserver from the folder that KUBEBUILDER_ASSETS names."""

import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.support.hosts.charts import CRDS, Object
from tests.support.waiting import wait_for

ASSETS = "KUBEBUILDER_ASSETS"


def why_no_api_server() -> str | None:
    """Return the reason why no API server can run here; None if one can."""
    folder = os.environ.get(ASSETS)
    if not folder or not all((Path(folder) / name).exists() for name in ("etcd", "kube-apiserver")):
        return f"{ASSETS} names no folder with etcd and kube-apiserver"
    return None if os.environ.get(CRDS) else f"{CRDS} names no folder with KubeRay's definitions"


@dataclass
class ApiServer:
    """A running API server."""

    client: httpx.Client
    kubeconfig: Path

    def apply(self, one: Object, *, namespace: str | None = None, dry_run: bool = False) -> httpx.Response:
        """Apply an object server-side; unknown fields are rejected."""
        options = {"fieldManager": "tests", "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        url = f"{self._url(one, namespace)}/{one['metadata']['name']}"
        headers = {"content-type": "application/apply-patch+yaml"}
        return self.client.patch(url, params=options, content=yaml.safe_dump(one), headers=headers)

    def get(self, kind: str, name: str, *, api: str = "v1", namespace: str) -> httpx.Response:
        """Get an object."""
        return self.client.get(f"{self._url({'apiVersion': api, 'kind': kind}, namespace)}/{name}")

    def _url(self, one: Object, namespace: str | None) -> str:
        version = one["apiVersion"]
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resources = self.client.get(base).raise_for_status().json()["resources"]
        (plural,) = [found["name"] for found in resources if found["kind"] == one["kind"] and "/" not in found["name"]]
        return f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run a server with KubeRay's definitions for the length of a test."""
    assets, token = Path(os.environ[ASSETS]), secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as text, ExitStack() as stack:
        folder = Path(text)
        _write_keys(folder, token)
        peer, store, port = free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{store}"
        log = stack.enter_context((folder / "log").open("ab"))

        def start(program: str, *options: str) -> None:
            process = subprocess.Popen([assets / program, *options], stdout=log, stderr=log)
            stack.callback(process.wait, timeout=30)
            stack.callback(process.kill)

        urls = ["listen-client-urls", "advertise-client-urls"]
        start(
            "etcd",
            f"--data-dir={folder}/etcd",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
            *(f"--{name}={etcd}" for name in urls),
        )
        start(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={folder}/certificates",
            "--service-account-issuer=https://127.0.0.1",
            f"--service-account-key-file={folder}/public.pem",
            f"--service-account-signing-key-file={folder}/private.pem",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=AlwaysAllow",
            f"--token-auth-file={folder}/tokens.csv",
            # Without a controller, the service accounts that pods wait for are missing.
            "--disable-admission-plugins=ServiceAccount",
        )
        url, headers = f"https://127.0.0.1:{port}", {"authorization": f"Bearer {token}"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, verify=False, timeout=30))
        wait_for(lambda: _is_ready(client), (folder / "log").read_text()[-2000:] or "the API server", seconds=60)
        server = ApiServer(client, _write_kubeconfig(folder, url, token))
        for file in sorted(Path(os.environ[CRDS]).glob("ray.io_*.yaml")):
            server.apply(yaml.safe_load(file.read_text())).raise_for_status()
        known = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
        wait_for(lambda: client.get(f"/apis/{known['apiVersion']}").is_success, "KubeRay's definitions")
        yield server


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/readyz").is_success
    except httpx.HTTPError:
        return False


def _write_keys(folder: Path, token: str) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "private.pem").write_bytes(private)
    (folder / "public.pem").write_bytes(public)
    (folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')


def _write_kubeconfig(folder: Path, url: str, token: str) -> Path:
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file
