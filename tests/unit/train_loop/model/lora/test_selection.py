"""Random settings of adapters select what peft itself selects, from specs and from folders that peft wrote."""

import random
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from tests.support.builders.any_size import GPT2, MOE
from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, spec
from tests.support.families.encoders import FAMILIES
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.model.families.choose import family_of
from train_loop.model.lora.adapters import inject_adapters, trained_parameters
from train_loop.model.lora.peft_config import read_adapter, with_adapter
from train_loop.model.lora.stored import match_adapters, stored_name
from train_loop.spec import JobSpec

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads a deprecated property
CLASSES = {"sequence_classification": {"labels": 3}}
ENCODER = {"bert": FAMILIES["bert"], "roberta": FAMILIES["roberta"], "distilbert": FAMILIES["distilbert"]}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "gpt2": GPT2,
    "qwen3_moe": MOE,
    "bloom": small("bloom"),
    "qwen2_moe": small("qwen2_moe"),
    **{name: {"model_type": name, "vocab_size": 60} | config for name, config in ENCODER.items()},
}
"""Configs by family; encoders have a head of classes."""


def plain(family: str) -> Any:
    """Return transformers' model on meta."""
    config = AutoConfig.for_model(**CONFIGS[family] | ({"num_labels": 3} if family in ENCODER else {}))
    auto = AutoModelForCausalLM if family not in ENCODER else AutoModelForSequenceClassification
    with torch.device("meta"):
        return auto.from_config(config)


def write_base(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if family not in ENCODER else AutoModelForMaskedLM
    auto.from_config(AutoConfig.for_model(**CONFIGS[family])).save_pretrained(folder)
    return folder


def job(base: Path, family: str, **model: Any) -> JobSpec:
    of_rows: dict[str, Any] = {"data": {"columns": {"text": "text", "label": "label"}, "packing": False}}
    head = {"head": CLASSES} if family in ENCODER else {}
    return spec(model={"config": None, "path": str(base), **head, **model}, **(of_rows if head else {}))


def ours(one: JobSpec) -> set[str]:
    """Return the trained tensors by their names in peft's files. Raises ModelError."""
    anatomy = family_of(one).build(one.model)
    inject_adapters(anatomy, one.model)
    return {stored_name(name) for name in trained_parameters(anatomy.model)}


def theirs(family: str, config: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Return the tensors that peft trains by their names in its files; None if it refuses the config."""
    task = "SEQ_CLS" if family in ENCODER else "CAUSAL_LM"
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model = peft.get_peft_model(plain(family), peft.LoraConfig(task_type=task, **config))
            found = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        except (TypeError, ValueError, KeyError):
            return None
    return {name.removeprefix("base_model.model."): value for name, value in found.items()}


NESTED = "original_module", "modules_to_save"
"""Parts of names of modules in which peft has put others."""


def drawn_names(draw: random.Random, names: list[str], most: int) -> list[str]:
    """Return ends of names: of whole parts, or plain ones."""
    chosen = draw.sample(names, draw.randint(1, most))
    return [".".join(name.split(".")[-draw.randint(1, 4) :]) for name in chosen]


def drawn_config(draw: random.Random, family: str) -> dict[str, Any]:
    """Return a random config of peft, with settings that a spec has."""
    model = plain(family)
    linear = [name for name, one in model.named_modules() if type(one).__name__ in ("Linear", "Conv1D")]
    layers = [name for name in linear if any(part.isdigit() for part in name.split("."))]
    held = [name for name, one in model.named_modules() if name and any(True for _ in one.parameters())]
    config: dict[str, Any] = {"r": 2, "target_modules": drawn_names(draw, layers, 3)}
    if draw.random() < 0.6:
        saved = drawn_names(draw, held, 2)
        # Plain ends of names, as norm for input_layernorm.
        config["modules_to_save"] = [name[draw.randrange(min(4, len(name))) :] for name in saved]
    if draw.random() < 0.3:
        config["layers_to_transform"] = [draw.randrange(2)]
    if "moe" in family and draw.random() < 0.5:
        config["target_parameters"] = draw.sample(["experts.gate_up_proj", "experts.down_proj"], 1)
        config.pop("layers_to_transform", None)
    return config


def of_spec(config: dict[str, Any]) -> dict[str, Any]:
    names = {"layers_to_transform": "layers"}
    return {names.get(name, name): value for name, value in config.items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("bases")
    return {family: write_base(home / family, family) for family in CONFIGS}


@pytest.mark.parametrize("family", CONFIGS)
def test_specs_select_what_peft_selects(bases: dict[str, Path], family: str) -> None:
    draw, compared = random.Random(family), 0
    random_heads = {"bert": ["bert.pooler"], "distilbert": ["pre_classifier"]}.get(family, [])
    while compared < seeds(5, more=50):
        config = drawn_config(draw, family)
        try:
            found = ours(job(bases[family], family, lora=of_spec(config)))
        except ModelError:
            continue
        # A user of peft names the random modules; this loop finds them.
        expected = theirs(family, config | {"modules_to_save": [*config.get("modules_to_save", []), *random_heads]})
        # peft cannot load a module that is trained whole inside another one.
        if expected is None or any(f".{part}." in name for name in expected for part in NESTED):
            continue
        compared += 1
        buffers = {name for name, _ in plain(family).named_buffers()}
        assert found == expected.keys() - buffers, config


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "qwen2_moe"])
def test_folders_of_peft_are_read_as_peft_reads_them(bases: dict[str, Path], family: str, tmp_path: Path) -> None:
    draw = random.Random(family)
    for seed in range(seeds(10, more=200)):
        config = drawn_config(draw, family)
        if draw.random() < 0.3:
            config["exclude_modules"] = drawn_names(draw, config["target_modules"], 1)
        if draw.random() < 0.3 and "target_parameters" not in config:
            config["target_modules"] = rf".*({'|'.join(name.rpartition('.')[2] for name in config['target_modules'])})"
        expected = theirs(family, config)
        if expected is None:
            continue
        folder = tmp_path / str(seed)
        with torch.device("meta"):
            peft.LoraConfig(task_type="CAUSAL_LM", **config).save_pretrained(folder)
        tensors = {f"base_model.model.{name}": torch.zeros(value.shape) for name, value in expected.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        found = with_adapter(job(bases[family], family, adapter=str(folder))).run
        try:
            anatomy = family_of(found).build(found.model)
            inject_adapters(anatomy, found.model)
        except ModelError:
            continue
        if any(".base_layer." in name for name in expected):
            with pytest.raises(ModelError, match="whole and with an adapter"):
                match_adapters(anatomy.model, read_adapter(folder))
            continue
        homes = match_adapters(anatomy.model, read_adapter(folder))
        assert {stored_name(name) for name in homes} == expected.keys(), config
