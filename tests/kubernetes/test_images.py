"""Images that `make images` built from this commit: their users and commands."""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.waiting import wait_for

TAG = "0.1.0"


def output(*command: str) -> str:
    """Return the output of a command. Raises CalledProcessError."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def why_no_images() -> str | None:
    """Return the reason to skip these tests; None if the images of this commit exist."""
    for command in ("buildah", "debootstrap"):
        if shutil.which(command) is None:
            return f"needs {command} (Debian: {command})"
    try:
        built = {config(name)["Labels"]["org.opencontainers.image.revision"] for name in ("trainshed", WORKER)}
    except (subprocess.CalledProcessError, KeyError, TypeError):
        return "`make images` has built no images"
    if not Path(".git").exists():
        return "needs the repository, to compare the images with its commit"
    return None if built == {output("git", "rev-parse", "HEAD")} else "the images are of another commit: `make images`"


WORKER = "trainshed-worker"


LAYERS = "{{range .OCIv1.RootFS.DiffIDs}}{{.}} {{end}}"


def config(name: str) -> dict[str, Any]:
    """Return the configuration of an image."""
    found: dict[str, Any] = json.loads(output("buildah", "inspect", "--type", "image", f"{name}:{TAG}"))["OCIv1"]
    inside: dict[str, Any] = found["config"]
    return inside


pytestmark = [
    pytest.mark.skipif((why := why_no_images()) is not None, reason=str(why)),
    pytest.mark.timeout(300),
]


@dataclass
class Container:
    """The mounted files of an image, and its configuration."""

    root: Path
    config: dict[str, Any]

    def command(self, *words: str, **environment: str) -> list[str]:
        """Return the command line for the given words, or for the image's own command, as the image's user."""
        own = dict(pair.split("=", 1) for pair in self.config["Env"])
        variables = [f"{name}={value}" for name, value in {**own, **environment}.items()]
        inside = list(words) or [*self.config["Entrypoint"], *self.config["Cmd"]]
        return ["chroot", f"--userspec={self.config['User']}", str(self.root), "env", "-i", *variables, *inside]


@contextmanager
def container(name: str) -> Iterator[Container]:
    """Mount an image."""
    made = output("buildah", "from", f"{name}:{TAG}")
    try:
        yield Container(Path(output("buildah", "mount", made)), config(name))
    finally:
        subprocess.run(["buildah", "rm", made], capture_output=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["trainshed", WORKER])
def test_labels_name_version_and_base_and_no_build_file_stays(name: str) -> None:
    with container(name) as image:
        labels = {key.removeprefix("org.opencontainers.image."): one for key, one in image.config["Labels"].items()}
        assert (labels["title"], labels["version"]) == (name, TAG)
        assert labels["base.name"]
        assert [*(image.root / "tmp").iterdir()] == []


def test_images_differ_in_small_layers_only() -> None:
    """Nodes that have one commit's images pull only what follows the shared layers for the next commit."""
    layers = {
        name: output("buildah", "inspect", "--type", "image", "--format", LAYERS, f"{name}:{TAG}").split()
        for name in ("trainshed", WORKER)
    }
    shared = [one for one, other in zip(*layers.values(), strict=False) if one == other]
    assert len(shared) >= 5, layers


def test_service_image_runs_its_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with container("trainshed") as image:
        assert image.config["User"] == "10001:10001"
        settings = {"TRAINSHED_PORT": str(port), "TRAINSHED_RAY_ADDRESS": "http://127.0.0.1:9"}
        process = subprocess.Popen(image.command(**settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert wait_for(lambda: answers(f"http://127.0.0.1:{port}/healthz"), "an answer", seconds=60)
        finally:
            process.terminate()
            process.wait(timeout=30)


def answers(url: str) -> bool:
    """Return True if the service answers with 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_worker_image_contains_the_commands_of_ray_and_kuberay() -> None:
    with container(WORKER) as image:
        assert image.config["User"] == "10001:10001"
        imports = ["python", "-c", "import torchao, mlflow, peft, train_loop.ray_train.worker; print('imported')"]
        for words in (["ray", "--version"], ["bash", "-c", "command -v wget"], imports):
            assert output(*image.command(*words))
        assert output(*image.command("id", "-u")) == "10001"


def test_health_check_fits_into_the_init_container_of_kuberay() -> None:
    """KubeRay's init container of workers runs this with a limit of 256 MiB."""
    script = (
        "import resource, subprocess; subprocess.run(['ray', 'health-check', '--address', '127.0.0.1:1']);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    with container(WORKER) as image:
        kibibytes = int(output(*image.command("python", "-c", script)).splitlines()[-1])
    assert kibibytes < 240 << 10
