"""The service in a pod: keys from mounted files, probes by address, and trusted proxies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.adapters.key_files import read_key
from service.errors import KeyUnusable
from tests.support.servers.served import Served, ended, environment_of, served

POD = "127.0.0.9"
"""A local address that is not part of any setting."""
METRICS_KEY = "only-for-prometheus"


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pod")
    for name, key in {"admin": "the-admin-key", "metrics": METRICS_KEY}.items():
        (folder / name).write_text(f"{key}\n")
        # Kubernetes mounts a Secret with this mode for a pod with an fsGroup.
        (folder / name).chmod(0o440)
    settings: dict[str, Any] = {
        "TRAINSHED_HOST": "0.0.0.0",
        "TRAINSHED_ADMIN_KEY_FILE": str(folder / "admin"),
        "TRAINSHED_METRICS_KEY_FILE": str(folder / "metrics"),
        "TRAINSHED_STRANGERS_PER_ADDRESS": "2/minute",
        "FORWARDED_ALLOW_IPS": "127.0.0.7,127.0.0.8",
    }
    with served(folder / "home", **settings) as service:
        service.takes_jobs()
        assert not (folder / "home" / "admin.key").exists()
        yield service


def test_probes_and_scrapes_by_pod_address_are_answered(pod: Served) -> None:
    url = f"http://{POD}:{pod.client.base_url.port}"
    for path in ("/healthz", "/readyz", "/metrics"):
        assert pod.client.get(f"{url}{path}").status_code == 200
    assert pod.client.get(f"{url}/jobs").status_code == 200


@pytest.mark.parametrize("host", ["10.9.9.9", "evil.example", "127.0.0.9.evil.example", "[fd77::1]", "127.0.0.99"])
def test_other_hosts_and_addresses_are_rejected(pod: Served, host: str) -> None:
    url = f"http://{POD}:{pod.client.base_url.port}/healthz"
    answer = pod.client.get(url, headers={"host": host})
    assert (answer.status_code, answer.json()["code"]) == (400, "host_refused")


def test_metrics_key_opens_only_the_metrics(pod: Served) -> None:
    key = {"authorization": f"Bearer {METRICS_KEY}"}
    answer = pod.client.get("/metrics", headers=key)
    assert answer.status_code == 200
    assert "# TYPE " in answer.text
    for method, path in (("GET", "/jobs"), ("POST", "/jobs"), ("GET", "/keys"), ("GET", "/audit"), ("POST", "/doctor")):
        refused = pod.client.request(method, path, headers=key)
        assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
        assert "is valid for GET /metrics only" in refused.json()["detail"]
    assert pod.client.get("/metrics", headers={"authorization": "Bearer x"}).status_code == 401


def test_clients_of_trusted_proxies_have_separate_rates(pod: Served) -> None:
    url = str(pod.client.base_url)

    def unauthenticated_calls(proxy: str, clients: list[str]) -> list[int]:
        with httpx.Client(base_url=url, transport=httpx.HTTPTransport(local_address=proxy), timeout=60) as client:
            return [client.get("/jobs", headers={"x-forwarded-for": one}).status_code for one in clients]

    assert unauthenticated_calls("127.0.0.7", ["192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.1"]) == [
        401,
        401,
        401,
        429,
    ]
    # The second proxy forwards requests of the same clients.
    assert unauthenticated_calls("127.0.0.8", ["192.0.2.1"]) == [429]
    # A caller that is not a trusted proxy is counted under its own address.
    assert unauthenticated_calls("127.0.0.6", ["192.0.2.3", "192.0.2.4", "192.0.2.5"]) == [401, 401, 429]


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file or directory"), ("", "is empty"), ("two words\n", "contains more than one word")],
)
def test_invalid_key_file_is_rejected_with_its_setting(tmp_path: Path, text: str | None, reason: str) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    with pytest.raises(KeyUnusable) as caught:
        read_key(file, setting="TRAINSHED_ADMIN_KEY_FILE")
    assert str(caught.value) == (
        f"{file}: {reason}; TRAINSHED_ADMIN_KEY_FILE must name a readable file with a key in one line"
    )


def test_service_without_a_valid_key_file_exits_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "key"
    assert failure(tmp_path / "home", TRAINSHED_METRICS_KEY_FILE=str(file)) == (
        f"{file}: No such file or directory; TRAINSHED_METRICS_KEY_FILE must name a readable file with a key in one "
        "line\n"
    )


def test_service_that_cannot_create_its_key_exits_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "home" / "admin.key").mkdir(parents=True)
    (tmp_path / "home").chmod(0o700)
    assert failure(tmp_path / "home") == (
        f"{tmp_path}/home/admin.key: Is a directory; mount the key there, set TRAINSHED_ADMIN_KEY_FILE to its "
        "file, or make the home of the service writable\n"
    )


def failure(home: Path, **settings: str) -> str:
    """Start a service that fails; return its stderr."""
    code, errors = ended(environment_of(home, **settings))
    assert code == 1
    return errors
