"""`trainshed check-model`: a right package holds its guarantees, and each wrong one fails the guarantee it breaks."""

import os
from pathlib import Path

import pytest

from tests.support.own_code import MODEL, example_job, own_spec, write_example
from train_loop.conformance.guarantees import (
    ACCEPTED,
    ACCUMULATED,
    DETERMINISTIC,
    EXPORTED,
    INITIALISED,
    PARALLEL,
    PLANNED,
    RESUMED,
    SPLIT,
    Toy,
    checks_of,
    result,
)
from train_loop.spec import parse

LINEAR = "self.last = nn.Linear(width, 1)"
FORWARD = "return self.last(self.first(x).tanh())"
WRONG: dict[str, tuple[dict[str, str], str, str]] = {
    # the replaced texts, the guarantee that does not hold, a part of its remedy or figure
    "mean": ({'reduction="sum"': 'reduction="mean"'}, ACCUMULATED, "the loss is a mean and not a sum"),
    "count of batches": (
        {'reduction="sum"), len(batch["y"])': 'reduction="mean"), 1'},
        ACCUMULATED,
        "the count of 7 rows is 1, and those of its parts are 1 and 1",
    ),
    "forgotten parameter": (
        {
            LINEAR: f"{LINEAR}\n        self.scale = Scale()",
            "class Model": "class Scale(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.gain = nn.Parameter(torch.ones(2))\n        self.bias = nn.Parameter(torch.ones(2))\n"
            "    def reset_parameters(self):\n        nn.init.ones_(self.gain)\n\nclass Model",
        },
        INITIALISED,
        "does not initialise scale.bias",
    ),
    "batch norm": ({LINEAR: "self.last = nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 1))"}, ACCEPTED, "Norm"),
    "mean over rows": (
        {FORWARD: "h = self.first(x); return self.last(h - h.mean(0))"},
        ACCUMULATED,
        "on the other rows",
    ),
    "random weights": (
        {
            "import torch\n": "import torch\nimport numpy\n",
            "class Model": "class Draws(nn.Linear):\n    def reset_parameters(self):\n"
            "        values = numpy.random.default_rng().normal(size=self.weight.shape)\n"
            "        self.weight.data.copy_(torch.from_numpy(values))\n"
            "        nn.init.zeros_(self.bias)\n\nclass Model",
            LINEAR: LINEAR.replace("nn.Linear", "Draws"),
        },
        INITIALISED,
        "last.weight differs",
    ),
    "random forward": (
        {
            "import torch\n": "import torch\nimport numpy\n",
            FORWARD: "return self.last(self.first(x).tanh()) * float(numpy.random.default_rng().normal())",
        },
        DETERMINISTIC,
        "the loss",
    ),
    "forgotten count": (
        # It decays its learning signal by a count that no checkpoint has.
        {
            "def forward(self, x):": "calls = 0\n    def forward(self, x):\n        Model.calls += self.training",
            FORWARD: "return self.last(self.first(x).tanh()) / (1 + Model.calls // 4)",
        },
        RESUMED,
        "differs after a resume",
    ),
}


MORE = bool(os.environ.get("MORE"))
SOME = ("mean", "forgotten parameter", "batch norm", "random forward", "forgotten count")
"""Wrong packages of every run of the tests; MORE=1 checks all."""
ELSEWHERE = (RESUMED, EXPORTED, [*PARALLEL][-1])
"""Guarantees whose positive result test_own_code.py and test_own_module.py show as well."""


def changed(changes: dict[str, str]) -> str:
    """Return MODEL with some texts replaced."""
    text = MODEL
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after, 1)
    return text


@pytest.mark.parametrize("name", WRONG if MORE else SOME)
def test_wrong_package_fails_the_guarantee_that_it_breaks(tmp_path: Path, name: str) -> None:
    changes, broken, told = WRONG[name]
    checks = checks_of(Toy(parse(own_spec(tmp_path, changed(changes))), tmp_path))
    before = () if broken == ACCEPTED else (ACCEPTED, *((DETERMINISTIC,) if broken == ACCUMULATED else ()))
    assert [found for one in before if (found := result(one, checks[one])).verdict != "holds"] == []
    found = result(broken, checks[broken])
    assert found.verdict == "does not hold"
    assert told in f"{found.seen}; {found.remedy}"


def test_plan_of_few_parameters_differs_by_few_bytes(tmp_path: Path) -> None:
    checks = checks_of(Toy(parse(own_spec(tmp_path, MODEL)), tmp_path))
    _, found = (result(one, checks[one]) for one in (ACCEPTED, PLANNED))
    assert (found.verdict, found.seen) == ("holds", "peak: 428 bytes planned, 484 measured")


def test_right_package_holds_its_guarantees(tmp_path: Path) -> None:
    write_example(tmp_path, "transformer")
    checks = checks_of(Toy(parse(example_job(tmp_path, "transformer")), tmp_path))
    found = [result(name, run) for name, run in checks.items() if MORE or name not in ELSEWHERE]
    assert [one for one in found if one.verdict != "holds"] == []


# Attention that forgets the exchange, positions that begin at 0, and a model without the method.
UNSPLIT = {
    "unused part": ("layer.attention.part = part", "pass", "exchanged nothing in its forward pass"),
    "wrong positions": ("start = self.first_part * seq_len", "start = 0", "differs: "),
    "no method": ("def split_sequence", "def other", "has no method split_sequence"),
}


@pytest.mark.parametrize("name", UNSPLIT if MORE else ["wrong positions"])
def test_wrongly_split_sequences_are_found(tmp_path: Path, name: str) -> None:
    before, after, told = UNSPLIT[name]
    write_example(tmp_path, "transformer")
    file = tmp_path / "transformer" / "transformer.py"
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))
    checks = checks_of(Toy(parse(example_job(tmp_path, "transformer")), tmp_path))
    needed = [checks[one]() for one in (ACCEPTED, DETERMINISTIC)]
    assert [one for one in needed if one.verdict != "holds"] == []
    found = result(next(iter(SPLIT)), checks[next(iter(SPLIT))])
    assert found.verdict == "does not hold"
    assert told in found.seen
