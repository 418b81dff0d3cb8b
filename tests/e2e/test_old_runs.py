"""Run directories and prepared data of older versions, resumed by the current code. See tests/fixtures/versions."""

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.versions import kinds, make
from tests.support.builders.searches import drawn
from tests.support.builders.versions import VERSIONS, WITH_KINDS, OldVersion, unpack
from train_loop.checkpoint.manifest import newest_verified
from train_loop.data.prepare.cache import find_dataset
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import parse_text

ROOT = Path(__file__).parents[2]
SERVED = "text"
"""The kind of the runs without the service in the fixtures of services."""
CASES = drawn(
    [(version, SERVED) for version in VERSIONS] + [(version, kind) for version in WITH_KINDS for kind in kinds.KINDS], 5
)


@dataclass(frozen=True)
class Resumed:
    """A run that an older version stopped half way, and the current code has resumed."""

    run: kinds.Run
    stopped_at: int
    made: dict[str, Any]
    metrics: list[dict[str, Any]]
    """The lines of the older version's uninterrupted run."""
    tensors: dict[str, str]
    """The digests of that run's last checkpoint, if the fixture has them."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.run[1]))

    @property
    def exact(self) -> bool:
        """True if this machine computes the same bits as that of the fixture."""
        return (self.made["torch"], self.made["machine"]) == (torch.__version__, platform.machine())


@pytest.fixture(scope="module")
def all_resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Resumed]:
    """Resume all runs, forked from one process that has imported the loop."""
    found = {}
    for version in [version for version, kind in CASES if kind == SERVED]:
        old = OldVersion.unpack(version, tmp_path_factory.mktemp(version))
        run: kinds.Run = str(old.folder / "spec.yaml"), str(old.stopped), str(old.home / "runs" / "_cache"), None
        found[version, SERVED] = Resumed(run, len(make.metrics(old.stopped)), old.made, old.losses, {})
    for version in WITH_KINDS:
        folder = tmp_path_factory.mktemp(version)
        made = unpack(f"{version}-kinds", folder)
        for kind in [kind for one, kind in CASES if one == version and kind != SERVED]:
            run = kinds.run_of(folder / "home", kind, "runs")
            result = json.loads((folder / "home" / f"{kind}.json").read_text())
            stopped_at = len(make.metrics(Path(run[1])))
            found[version, kind] = Resumed(run, stopped_at, made, result["metrics"], result["tensors"])
    codes = kinds.train([one.run for one in found.values()], ROOT)
    assert dict(zip(found, codes, strict=True)) == dict.fromkeys(found, 0)
    return found


@pytest.fixture(params=CASES, ids="-".join)
def resumed(request: pytest.FixtureRequest, all_resumed: dict[tuple[str, str], Resumed]) -> Resumed:
    return all_resumed[request.param]


def test_run_of_old_version_resumes_from_its_newest_checkpoint(resumed: Resumed) -> None:
    lines = read_lines(resumed.run_dir.attempt(1).events)
    assert [one["resumed_from"] for one in lines if one["event"] == "training_started"] == [0, resumed.stopped_at]
    newest, rejected = newest_verified(resumed.run_dir)
    assert newest is not None
    assert (newest.step, rejected) == (len(resumed.metrics), {})
    outcome = resumed.run_dir.attempt(1).outcome()
    assert outcome is not None
    assert outcome.result == "succeeded"


def test_resumed_run_of_old_version_has_the_bits_of_its_uninterrupted_run(resumed: Resumed) -> None:
    found = make.metrics(resumed.run_dir.root)
    if resumed.exact:
        assert found == resumed.metrics
        assert not resumed.tensors or kinds.result(resumed.run_dir.root)["tensors"] == resumed.tensors
        return
    # Other kernels round differently; the order of samples and the learning rates are still exact.
    exact, rounded = ("step", "lr", "tokens", "samples"), ("loss", "grad_norm")
    assert [[line[name] for name in exact] for line in found] == [
        [line[name] for name in exact] for line in resumed.metrics
    ]
    for name in rounded:
        assert [line[name] for line in found] == pytest.approx([line[name] for line in resumed.metrics], rel=1e-3)


@pytest.mark.parametrize("version", WITH_KINDS)
def test_tokens_that_an_old_version_prepared_are_not_prepared_again(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(f"{version}-kinds", tmp_path)
    home = tmp_path / "home"
    # The path of the data begins with it.
    monkeypatch.chdir(home)
    found = find_dataset(parse_text((home / "packed.yaml").read_bytes()), home / "cache")
    assert [Path(str(part.index)).is_relative_to(home / "cache") for part in found.parts] == [True]
