"""The seam between the loop and a family of models: few files know a library, and a plain module fits as well."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.two_branches import Branches, Plain
from train_loop.errors import ModelError
from train_loop.model.build import check_rules, materialise
from train_loop.model.families.choose import family_of
from train_loop.model.load import give_weights

NAMES = {
    *("PreTrainedModel", "PretrainedConfig", "PreTrainedConfig", "_no_split_modules", "_attn_implementation"),
    *("get_input_embeddings", "get_output_embeddings", "get_text_config", "tie_weights", "_init_weights"),
}
MARK = "<model>"
SPEAKING = {"train_loop/model/families/causal/attention.py", "train_loop/model/families/causal/build.py"}
"""Files that may use the names."""
MODELS = ("transformers.models", "transformers.modeling", "transformers.masking", "transformers.conversion")


def names_of(tree: ast.AST) -> Iterator[str]:
    """Yield names, attributes, imports and whole strings of code; MARK for a model's config or a library's module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            yield MARK if node.attr == "config" and owner in ("model", "self.model") else node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
            yield MARK if (node.module or "").startswith(MODELS) else ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_names_of_hugging_face_models_are_in_few_files() -> None:
    known = {*NAMES, MARK}
    every = Path("train_loop").rglob("*.py")
    named = {str(file): known.intersection(names_of(ast.parse(file.read_text()))) for file in every}
    # Users' own modules have a rule and a list of these names, too.
    assert named.pop("train_loop/model/families/own.py") == {"_init_weights", "_no_split_modules"}
    assert {file for file, names in named.items() if names} == SPEAKING


MODEL = spec(model={"config": TINY}).model


def test_plain_module_is_initialised_tied_loaded_and_called(tmp_path: Path) -> None:
    family = Plain()
    blueprint, built = family.build(MODEL), family.build(MODEL)
    with pytest.raises(ModelError, match=r"mymodel 1\.0 does not initialise scale \(Branches\), so its values"):
        check_rules(blueprint)
    check_rules(blueprint, stored=["scale"])
    weights = Branches().state_dict()
    save_file(
        {name: weights[name] for name in ("left.weight", "left.bias", "right.bias", "scale")},
        tmp_path / "model.safetensors",
    )
    stored = MODEL.model_copy(update={"path": tmp_path.as_uri(), "config": None})
    assert give_weights(built.model, blueprint, stored, seed=0, device=torch.device("cpu")) == []
    assert built.model.get_parameter("right.weight") is built.model.get_parameter("left.weight")
    expected = Branches()
    expected.load_state_dict(weights)
    rows = {"left": torch.ones(2, 4), "right": torch.zeros(2, 4)}
    assert torch.equal(family.call(built.model, rows, family.arguments(built.model, rows)), expected(**rows))


@pytest.mark.parametrize(
    ("part", "setting", "message"),
    [
        ("data", {"packing": True}, "Branches does not keep packed documents apart; set data.packing: false"),
        ("strategy", {"ulysses_size": 2}, "ulysses_size=2 needs attention that can be split by heads"),
        ("training", {"chunked_loss": True}, "chunked_loss needs to know the steps after the head of Branches"),
        ("training", {"reproducible": "any_size"}, "Branches is not proven to give the same bits at every size"),
        ("model", {"attn_implementation": "sdpa"}, "attn_implementation=sdpa has no effect on Branches"),
    ],
)
def test_plain_module_rejects_settings_that_need_more(part: str, setting: dict[str, Any], message: str) -> None:
    base: dict[str, dict[str, Any]] = {"data": {"packing": False}, "scaling": {"num_workers": 2}}
    base["training"] = {"global_batch_size": 4}
    job, family = spec(**base | {part: base.get(part, {}) | setting}), Plain()
    (check,) = family.examine(family.build(MODEL), job).settings
    assert check.pointer == f"/{part}/{next(iter(setting))}"
    with pytest.raises(ModelError, match=re.escape(message)):
        check.check()


def test_random_weights_of_a_plain_module_depend_on_the_seed_only() -> None:
    def drawn(seed: int) -> list[float]:
        model, blueprint = (nn.Sequential(nn.Linear(4, 4, device="meta")) for _ in range(2))
        materialise(model, Plain().anatomy(blueprint), seed=seed, device=torch.device("cpu"))
        return model.get_parameter("0.weight").flatten().tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_family_of_a_spec_builds_its_model() -> None:
    job = spec(model={"config": TINY})
    anatomy = family_of(job).build(job.model)
    assert anatomy.family is family_of(job)
    assert {one.device.type for one in anatomy.model.parameters()} == {"meta"}
