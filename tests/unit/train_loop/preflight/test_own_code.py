"""Checks of own code before a job is stored."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_code import MODEL, forget_imports, own_spec
from train_loop.code.package import read_package
from train_loop.plan import ModelShape, plan_job
from train_loop.preflight.checks import check_data
from train_loop.preflight.model import check_model
from train_loop.preflight.own_code import check_calls, import_code, read_code
from train_loop.run_dir import ReadPolicy
from train_loop.spec import JobSpec, Problem, parse
from train_loop.system.input_files import limit_inputs


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with forget_imports():
        yield


def check(raw: dict[str, Any], root: Path, *, code: bool = True) -> tuple[JobSpec, ModelShape | None, dict[str, str]]:
    """Return a spec with its digest, the model's sizes, and the problems by pointer."""
    policy = ReadPolicy(project="default", roots=(str(root),), code=code)
    found = list[Problem]()
    with limit_inputs(policy):
        spec, shape = parse(raw), None
        digested, problems = read_code(spec, policy, lambda pointer: None)
        if digested is not None:
            spec = spec.model_copy(update={"code": digested})
            problems = import_code(digested, lambda pointer: None)
        if not problems:
            shape, problems = check_model(spec, policy)
            found += check_data(spec, policy)
        if not problems and not found:
            problems = check_calls(spec, lambda pointer: None)
    return spec, shape, {one.pointer: one.message for one in (*problems, *found)}


def test_valid_code_has_a_digest_counted_sizes_and_no_problems(tmp_path: Path) -> None:
    spec, shape, problems = check(own_spec(tmp_path), tmp_path)
    assert problems == {}
    assert spec.code is not None
    assert spec.code.sha256 == read_package(str(tmp_path / "code")).sha256
    assert shape is not None
    assert shape.parameters == 2 * 3 + 3 + 3 + 1
    memory = {term.name: term.bytes for term in plan_job(spec, shape).memory}
    assert (memory["parameters"], memory["optimizer"]) == (4 * 13, 8 * 13)


@pytest.mark.parametrize("options", ["std=0.1", "std: float = 0.1", "*, std=0.1"])
def test_rule_of_a_model_may_have_options(tmp_path: Path, options: str) -> None:
    rule = f"    def init_weights(self, {options}):\n        nn.init.normal_(self.last.weight, std=std)\n"
    text = MODEL.replace("    def forward(", f"{rule}    def forward(")
    _, _, problems = check(own_spec(tmp_path, text), tmp_path)
    assert problems == {}


def test_rule_that_needs_a_number_is_left_to_the_rule_that_calls_it(tmp_path: Path) -> None:
    """Layers of torchtitan have such rules."""
    scale = "class Scale(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    scale += "        self.by = nn.Parameter(torch.empty(1))\n"
    scale += "    def init_weights(self, std: float):\n        nn.init.normal_(self.by, std=std)\n"
    rule = "    def init_weights(self):\n        self.scale.init_weights(0.1)\n    def forward("
    text = MODEL.replace("class Model", f"{scale}\nclass Model").replace("    def forward(", rule)
    text = text.replace(
        "super().__init__()\n        self.first", "super().__init__()\n        self.scale = Scale()\n        self.first"
    )
    _, _, problems = check(own_spec(tmp_path, text), tmp_path)
    assert problems == {}


def test_project_without_permission_is_refused_before_the_package_is_read(tmp_path: Path) -> None:
    _, _, problems = check(own_spec(tmp_path), tmp_path, code=False)
    assert list(problems) == ["/code"]


def test_package_outside_the_roots_is_refused(tmp_path: Path) -> None:
    _, _, problems = check(own_spec(tmp_path / "a"), tmp_path / "b")
    assert "lies outside the allowed storage roots" in problems["/code/package"]


def test_other_digest_is_refused_with_both(tmp_path: Path) -> None:
    _, _, problems = check(own_spec(tmp_path, code={"sha256": "a" * 64}), tmp_path)
    assert read_package(str(tmp_path / "code")).sha256 in problems["/code/sha256"]
    assert "a" * 64 in problems["/code/sha256"]


CASES: list[tuple[str, str, str, str]] = [
    ("import torch", "import torc", "/code/model", "ModuleNotFoundError: .* \\(mymodel.py, line 2"),
    ("def loss(", "def los(", "/code/loss", "mymodel has no loss"),
    (
        "super().__init__()",
        "super().__init__(); self._no_split_modules = ['Nope']",
        "/code/model",
        "_no_split_modules of mymodel:build names Nope, and no part .* has such a class; choose among Linear",
    ),
    (
        "super().__init__()",
        "super().__init__(); self._no_split_modules = 'Linear'",
        "/code/model",
        "_no_split_modules of mymodel:build is 'Linear'; expected a list of names",
    ),
    (
        "nn.Linear(width, 1)",
        "nn.Linear(width, 1); self.copy = nn.Linear(2, width)\n"
        "    def init_weights(self):\n        self.copy.weight.copy_(self.first.weight)",
        "/code/model",
        "the initialisation of copy failed: .*meta tensor.*line 12, in init_weights",
    ),
    ('len(batch["y"])', "-1", "/code/loss", "mymodel:loss returned the count -1; return 0 or more"),
    (
        "return F.mse_loss(",
        "torch.distributed.all_reduce(batch['y']); return F.mse_loss(",
        "/code/loss",
        "mymodel:loss failed: ValueError: Default process group has not been initialized.*line 21, in loss",
    ),
    ("def batch(", "def batc(", "/code/batch", "mymodel has no batch"),
    ("return Model(**config)", "return 3", "/code/model", "returned a int; return a torch.nn.Module"),
    ("return Model(**config)", "1/0", "/code/model", "ZeroDivisionError: .*line 15, in build"),
    ("return Model(**config)", "return nn.ReLU()", "/code/model", "without parameters"),
    ("return Model(**config)", "return nn.LazyLinear(3)", "/code/model", "weight of mymodel:build is lazy"),
    ("nn.Linear(width, 1)", "nn.Linear(width, 1, device='cpu')", "/code/model", "last.weight on the device cpu"),
    ("nn.Linear(width, 1)", "nn.Linear(width, 1, dtype=torch.complex64)", "/code/model", "last.weight .* is complex"),
    (
        "super().__init__()",
        "super().__init__(); self.words = nn.Embedding(7, 2, sparse=True)",
        "/code/model",
        "words of mymodel:build has sparse gradients, which FSDP cannot sum; create it with sparse=False",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.words = nn.EmbeddingBag(7, 2, max_norm=1.0)",
        "/code/model",
        "words of mymodel:build has max_norm, which changes gathered weights in the forward pass; ",
    ),
    (
        "nn.Linear(width, 1)",
        "nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 1))",
        "/code/model",
        "last.0 of mymodel:build is a BatchNorm1d",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.scale = nn.Parameter(torch.ones(3))",
        "/code/model",
        "mymodel:build does not initialise scale \\(Model\\).*reset_parameters",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.register_buffer('scale', torch.ones(3))",
        "/code/model",
        "mymodel:build does not initialise scale",
    ),
    ('"x": columns["x"]', '"x": columns["z"]', "/code/batch", "KeyError: 'z' \\(mymodel.py, line 18, in batch"),
    ('return {"x"', 'return [1]\n    return {"x"', "/code/batch", "returned a list; return a mapping"),
    ("model(batch", "model(batch, batch", "/code/loss", "TypeError"),
    (
        ', reduction="sum"), len(batch["y"])',
        ")",
        "/code/loss",
        "tensor of float32 with the shape \\[\\]; return \\(sum",
    ),
    ('reduction="sum"', 'reduction="none"', "/code/loss", "tensor of float32 with the shape \\[1\\] as the sum"),
    ('len(batch["y"])', "None", "/code/loss", "NoneType as count"),
    ('model(batch["x"])', 'model(batch["x"]).detach()', "/code/loss", "a sum without gradient"),
    (
        "super().__init__()",
        "super().__init__(); self.scale = nn.Parameter(torch.ones(()))",
        "/code/model",
        "scale of mymodel:build is a parameter without dimensions, .* give it the shape \\[1\\]",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.scale = torch.ones(3)",
        "/code/model",
        "mymodel:build keeps the tensor scale as an attribute, .* register_buffer",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.all = [nn.Linear(2, 2)]",
        "/code/model",
        "mymodel:build holds modules in all, a list; use nn.ModuleList",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.all = {'a': nn.Parameter(torch.ones(2))}",
        "/code/model",
        "mymodel:build holds parameters in all, a dict; use nn.ParameterList",
    ),
    (
        "super().__init__()",
        "super().__init__(); self.lock = __import__('threading').Lock()",
        "/code/model",
        "a copy of the module of mymodel:build failed: TypeError: .*lock",
    ),
    ("return Model(**config)", "return Model(**config).requires_grad_(False)", "/code/model", "are all frozen"),
    (
        "nn.Linear(width, 1)",
        "nn.Sequential(nn.Unflatten(-1, (1, width)), nn.InstanceNorm1d(1, track_running_stats=True), nn.Flatten(), "
        "nn.Linear(width, 1))",
        "/code/loss",
        r"changes the buffer last.1.(running_mean|num_batches_tracked), which each rank would",
    ),
    ('model(batch["x"])', 'model.last(model.first(batch["x"]))', "/code/loss", "does not call the model itself"),
]


@pytest.mark.parametrize(("before", "after", "pointer", "problem"), CASES)
def test_errors_of_the_code_are_problems_of_its_field(
    tmp_path: Path, before: str, after: str, pointer: str, problem: str
) -> None:
    assert before in MODEL
    _, _, problems = check(own_spec(tmp_path, MODEL.replace(before, after)), tmp_path)
    assert list(problems) == [pointer]
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(problems[pointer])


@pytest.mark.parametrize("how", ["offload", "selective", {"every": 2}])
def test_recomputation_without_layers_is_refused(tmp_path: Path, how: Any) -> None:
    raw = own_spec(tmp_path, model={"gradient_checkpointing": how})
    shown = "{every: 2}" if isinstance(how, dict) else how
    found = check(raw, tmp_path)[2]["/model/gradient_checkpointing"]
    assert found.startswith(f"gradient_checkpointing={shown} needs layers, and ")
    assert found.endswith("in strategy.wrap_policy or _no_split_modules")


LAYERS = """
class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)
    def forward(self, x):
        return x + self.inner(x)

class Model(nn.Module):
    _no_split_modules = ["Layer"]
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.last = nn.Linear(width, 1)
    def forward(self, raw):
        x = self.first(raw)
        CALLS
        return self.last(x)

def build("""


def with_layers(calls: str) -> str:
    return MODEL.partition("class Model")[0] + LAYERS.replace("CALLS", calls) + MODEL.partition("def build(")[2]


@pytest.mark.parametrize(
    "calls",
    [
        "x = self.layers[0](x) if torch.rand(()) < 0.5 else x; x = self.layers[1](x)",
        "x = self.layers[int(raw[0, 0]) % 2](x)",
    ],
)
def test_layers_that_only_some_ranks_would_call_are_refused(tmp_path: Path, calls: str) -> None:
    text = with_layers(calls)
    assert check(own_spec(tmp_path, text), tmp_path)[2] == {}
    message = check(own_spec(tmp_path, text, scaling={"num_workers": 2}), tmp_path)[2]["/code/loss"]
    assert message.startswith("the loss calls layers.0")
    assert "at random or for some rows only, and ranks would differ; FSDP gathers a layer on all ranks" in message


def test_unit_that_is_called_twice_is_refused_for_any_size(tmp_path: Path) -> None:
    text, at = (
        with_layers("x = self.layers[1](self.layers[1](self.layers[0](x)))"),
        {"reproducible": "any_size", "global_batch_size": 4},
    )
    assert check(own_spec(tmp_path, text), tmp_path)[2] == {}
    message = check(own_spec(tmp_path, text, training=at), tmp_path)[2]["/code/loss"]
    assert message.startswith("the loss calls layers.1 2 times, and reproducible=any_size needs one call")


def test_code_that_needs_values_is_left_to_the_ranks(tmp_path: Path) -> None:
    text = MODEL.replace('len(batch["y"])', 'int((batch["y"] > 0).sum())')
    assert check(own_spec(tmp_path, text), tmp_path)[2] == {}


def test_missing_column_and_strange_type_are_problems_of_the_columns(tmp_path: Path) -> None:
    _, _, problems = check(own_spec(tmp_path, data={"columns": {"own": ["x", "z"]}}), tmp_path)
    assert list(problems) == ["/data/columns"]


def test_wrapped_class_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    raw = own_spec(tmp_path, strategy={"wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]}})
    assert (
        "matches no module of Model" in check(raw, tmp_path)[2]["/strategy/wrap_policy/transformer_layer_cls_to_wrap"]
    )


def test_declared_sums_are_expected(tmp_path: Path) -> None:
    raw = own_spec(tmp_path, code={"sums": ["correct"]})
    assert "return (sum, count, {correct})" in check(raw, tmp_path)[2]["/code/loss"]
    text = MODEL.replace('len(batch["y"])', 'len(batch["y"]), {"right": 1}')
    raw = own_spec(tmp_path, text, code={"sums": ["correct"]})
    assert (
        "returned the sums ['right']; return those of code.sums: ['correct']" in check(raw, tmp_path)[2]["/code/loss"]
    )


FORWARD = "return self.last(self.first(x).tanh())"
DIRECT = "return F.linear(F.linear(x, self.first.weight).tanh(), self.last.weight.T.T)"
DECAY = f"{FORWARD} + self.first.weight.sum()"
LOSS = "def loss(model, batch):"


@pytest.mark.parametrize(
    ("before", "after", "least", "problem"),
    [
        (FORWARD, DIRECT, None, ""),
        (
            FORWARD,
            DIRECT,
            4,
            "first.weight is used while first (Linear) is not called (mymodel.py, line 12, in forward)",
        ),
        (FORWARD, DIRECT, 4, "call first, or set strategy.wrap_policy.min_num_params above 9"),
        (FORWARD, DECAY, 4, "call first"),
        (FORWARD, DECAY, None, ""),
        (LOSS, f"{LOSS}\n    model.first(batch['x'])", None, "first.weight is used before the model is called"),
    ],
)
def test_parameters_of_units_that_are_not_called_are_named(
    tmp_path: Path, before: str, after: str, least: int | None, problem: str
) -> None:
    policy: dict[str, Any] = {} if least is None else {"strategy": {"wrap_policy": {"min_num_params": least}}}
    _, _, problems = check(own_spec(tmp_path, MODEL.replace(before, after), **policy), tmp_path)
    assert list(problems) == (["/code/loss"] if problem else [])
    assert problem in problems.get("/code/loss", "")


@pytest.mark.parametrize(
    ("sequence", "problem"),
    [
        ({"x": 1}, "ulysses_size=4 does not divide the 2 of dimension 1 of x"),
        ({"z": 1}, "code.sequence splits dimension 1 of z, and the batch has no such entry"),
        ({"y": 1}, "the batch has a tensor of float32 with the shape [1] there"),
    ],
)
def test_entries_that_cannot_be_split_are_named(tmp_path: Path, sequence: dict[str, int], problem: str) -> None:
    text = MODEL.replace("def forward", "def split_sequence(self, part):\n        pass\n    def forward")
    raw = own_spec(
        tmp_path, text, code={"sequence": sequence}, strategy={"ulysses_size": 4}, scaling={"num_workers": 4}
    )
    assert problem in check(raw, tmp_path)[2]["/code/sequence"]


def test_model_without_a_way_to_split_sequences_is_refused(tmp_path: Path) -> None:
    strategy: dict[str, Any] = {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}
    raw = own_spec(tmp_path, code={"sequence": {"x": 1}}, **strategy)
    assert "Model of mymodel:build has no method split_sequence" in check(raw, tmp_path)[2]["/strategy/ulysses_size"]
