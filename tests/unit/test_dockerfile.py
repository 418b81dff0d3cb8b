"""Layers of both images: dependencies are one shared layer, and the code is the last, small one."""

import re
from pathlib import Path

import pytest

STAGES = dict(
    re.findall(
        r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", Path("deploy/Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
)
PARENTS = {
    name: parent for parent, name in re.findall(r"^FROM (\S+) AS (\w+)", Path("deploy/Dockerfile").read_text(), re.M)
}


def test_both_images_share_the_layer_of_the_dependencies() -> None:
    assert (PARENTS["service"], PARENTS["worker"]) == ("runtime", "runtime")
    copies = [name for name, text in STAGES.items() if "COPY --from=packages /opt/trainshed/.venv" in text]
    assert copies == ["runtime"]


def test_code_is_copied_after_the_dependencies_and_installed_last() -> None:
    assert "COPY train_loop" not in STAGES["packages"]
    assert "pip install '.[ray,lora,s3,service,postgres,otel]'" in STAGES["packages"]
    assert "COPY train_loop" in STAGES["project"]
    for image in ("service", "worker"):
        after = STAGES[image].split("COPY --from=project /wheels /wheels")[1]
        assert "pip install --no-deps --force-reinstall" in after
        # A later layer with other files would be pulled for each commit.
        assert "apt-get" not in after


@pytest.mark.parametrize("image", ["service", "worker"])
def test_version_and_commit_change_no_layer(image: str) -> None:
    """A variable that differs per commit invalidates every later layer."""
    before, after = STAGES[image].split("ARG VERSION")
    assert not re.search("^(RUN|COPY)", after, re.MULTILINE)
    assert not re.search("REVISION|SOURCE", before)
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", after))
    assert labels == {"title", "description", "version", "revision", "source", "base.name"}


def test_images_contain_bytecode_of_the_standard_library() -> None:
    assert "compileall" in STAGES["runtime"]
