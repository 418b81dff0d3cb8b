"""Folders with adapters: their settings as a spec has them, all that is refused, and their tensors by shape."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.builders.specs import infer_spec, may_read, raw_spec, spec
from tests.support.ranks.peft_folders import CONFIG, write_parts
from train_loop.errors import ModelError
from train_loop.model.lora.peft_config import _adapted, other_base, read_adapter, with_adapter
from train_loop.preflight.adapters import read_settings
from train_loop.run import resolve_adapter
from train_loop.run_dir import RunDir
from train_loop.spec import InferJobSpec, JobSpec, LoraSpec, SpecError, dump, load, parse, parse_any

WEIGHTS_FILE = "adapter_model.safetensors"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def job(folder: Path, lora: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    return parse(
        raw_spec(model={"config": None, "path": "/models/base", "adapter": str(folder), "lora": lora}, **parts)
    )


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({}, {"r": 2, "alpha": 8, "target_modules": ["q_proj"]}),
        (
            {"lora_dropout": 0.1, "use_dora": True, "use_rslora": True, "layers_to_transform": 1},
            {"dropout": 0.1, "use_dora": True, "use_rslora": True, "layers": [1]},
        ),
        ({"target_modules": ["v", "k"], "modules_to_save": ["b", "a"]}, {"target_modules": ["k", "v"]}),
        ({"init_lora_weights": "gaussian"}, {"init": "gaussian"}),
        (
            {"init_lora_weights": "orthogonal", "loftq_config": {}, "megatron_core": "megatron.core"},
            {"init": "kaiming"},
        ),
        ({"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score", "x"]}, {"modules_to_save": ["x"]}),
        (
            {"target_modules": None, "target_parameters": EXPERTS},
            {"target_modules": [], "target_parameters": EXPERTS[::-1]},
        ),
    ],
)
def test_settings_of_a_folder_become_those_of_the_spec(
    tmp_path: Path, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    found = with_adapter(job(write_parts(tmp_path, **config)))
    assert found.model.lora is not None
    plain = found.model.lora.model_dump(mode="json")
    assert plain | fields == plain
    assert load(dump(found)) == found
    assert with_adapter(found) == found, "a stored spec, which has them, is the same"


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.0\.(q|v)_proj"},
        {"exclude_modules": ["b"]},
        {"target_modules": "all-linear"},
        {"layers_to_transform": [0], "target_parameters": EXPERTS},
    ],
)
def test_targets_by_a_pattern_are_those_that_have_tensors(tmp_path: Path, config: dict[str, Any]) -> None:
    names = ("layers.0.q_proj", "layers.0.v_proj", "layers.0.experts", "layers.0.experts.base_layer")
    tensors = {f"{name}.lora_{part}.weight": torch.ones(1) for name in names for part in "AB"}
    lora = read_adapter(write_parts(tmp_path, tensors, **{"target_parameters": EXPERTS} | config)).lora
    assert lora.target_modules == ("layers.0.q_proj", "layers.0.v_proj")
    assert (lora.target_parameters, lora.layers) == (tuple(sorted(EXPERTS)), None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3', and only LORA is supported; name another folder"),
        ({"bias": "all"}, 'has settings that are not supported: bias="all"; train adapters without them, or merge'),
        ({"rank_pattern": {"q": 4}}, 'has settings that are not supported: rank_pattern={"q": 4}; train'),
        ({"alpha_pattern": {"q": 4}}, 'has settings that are not supported: alpha_pattern={"q": 4}; train'),
        ({"layer_replication": [[0, 2]]}, "has settings that are not supported: layer_replication=[[0, 2]]; train"),
        ({"lora_bias": True, "a_new_one": 3}, "not supported: lora_bias=true, a_new_one=3; train adapters without"),
        ({"ensure_weight_tying": True}, "has settings that are not supported: ensure_weight_tying=true; train"),
        *(
            (
                {"init_lora_weights": init},
                f"not supported: init_lora_weights='{init}' (it has changed the frozen weights)",
            )
            for init in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
        ),
        ({"r": "2"}, "has an invalid r: Input should be a valid integer; name another folder"),
        ({"lora_alpha": 0}, "has an invalid lora_alpha: Input should be greater than 0; name another folder"),
        ({"target_modules": []}, "has invalid settings: target_modules and target_parameters are both empty"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        with_adapter(job(write_parts(tmp_path, **config)))
    assert str(error.value).startswith(f"{tmp_path}/adapter_config.json ")
    assert message in str(error.value)


@pytest.mark.parametrize("field", ["target_modules", "target_parameters", "modules_to_save"])
def test_lists_of_other_values_are_refused(tmp_path: Path, field: str) -> None:
    config: dict[str, Any] = {field: {"a": 1}}
    with pytest.raises(
        ModelError, match=f"{field} in adapter_config.json is .*, and not a list of names; copy the folder"
    ):
        read_adapter(write_parts(tmp_path, None, **config))
    with pytest.raises(ModelError, match="has an invalid layers_to_transform"):
        read_adapter(write_parts(tmp_path, layers_to_transform=["a"]))


def test_folder_that_is_incomplete_is_refused_with_the_way_to_convert_pickles(tmp_path: Path) -> None:
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    pickle = tmp_path / "adapter_model.bin"
    refused: dict[str, tuple[Path, bytes]] = {
        f"{config} is not JSON": (config, b"{"),
        f"{config} is not a mapping of settings; copy it again": (config, b"[]"),
        f"{tmp_path} holds no adapter_model.safetensors; give": (config, json.dumps(CONFIG).encode()),
        f"{tmp_path} holds adapter_model.bin, and jobs read no pickles; convert it there with python -c": (
            pickle,
            b"1",
        ),
        f"{weights} is not a complete safetensors file": (weights, b"1"),
    }
    with pytest.raises(
        ModelError, match=r"adapter_config\.json not found; give a folder that save_pretrained of peft wrote"
    ):
        with_adapter(job(tmp_path))
    for message, (file, content) in refused.items():
        file.write_bytes(content)
        with pytest.raises(ModelError) as error:
            with_adapter(job(tmp_path))
        assert str(error.value).startswith(message)


def test_spec_that_contradicts_the_folder_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = write_parts(tmp_path, target_modules=["v_proj", "q_proj"])
    same = {"r": 2, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    assert with_adapter(job(folder, same)).model.lora == LoraSpec.model_validate_json(json.dumps(same))
    with pytest.raises(ModelError) as error:
        with_adapter(job(folder, same | {"r": 4, "target_modules": ["q_proj"], "use_dora": True}))
    assert str(error.value) == (
        f"model.lora contradicts {folder}/adapter_config.json: r=4 and r=2; use_dora=True and "
        "use_dora=False; remove model.lora, whose settings the folder has"
    )


def test_another_base_is_warned_of(tmp_path: Path) -> None:
    for base, warned in (("meta/Base", False), ("/x/base/", False), (None, False), ("meta/other", True)):
        folder = write_parts(tmp_path / str(warned), base_model_name_or_path=base)
        found = other_base(job(folder).model)
        assert found == (
            "model.adapter was trained on meta/other by its adapter_config.json, and model.path is /models/base; check "
            "that both are the same weights"
            if warned
            else None
        )


def test_settings_that_do_not_go_with_the_folder_are_refused(tmp_path: Path) -> None:
    message = r"sequence_parallel is not proven with model\.adapter; change it, or remove adapter"
    with pytest.raises(SpecError, match=message):
        job(tmp_path, strategy={"tp_size": 2, "sequence_parallel": True}, scaling={"num_workers": 2})
    with pytest.raises(SpecError, match=r"adapter needs the model that it was trained on; set model\.path, or remove"):
        spec(model={"adapter": str(tmp_path)})
    with pytest.raises(SpecError, match="hf download you/lora --local-dir /models/lora"):
        spec(model={"adapter": "you/lora"})
    with pytest.raises(
        SpecError, match="adapter contradicts job, whose checkpoint has the weights; remove one of them"
    ):
        parse_any(infer_spec() | {"model": {"job": "j", "path": "/b", "adapter": "/a", "dtype": "fp32"}})
    compiled = job(write_parts(tmp_path, target_parameters=EXPERTS), training={"optimizer": "muon"})
    with pytest.raises(SpecError, match="optimizer=muon with target_parameters is not supported"):
        with_adapter(compiled)


def test_preflight_reads_the_folder_under_the_policy(tmp_path: Path) -> None:
    inside = write_parts(tmp_path / "roots" / "a", base_model_name_or_path="other")
    outside, roots = write_parts(tmp_path / "b"), may_read(f"file://{tmp_path}/roots")
    found = read_settings(job(inside), roots, None)
    assert found.lora == with_adapter(job(inside)).model.lora
    assert ("meta" in str(found.notes), len(found.notes)) == (False, 1)
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for folder in (outside, inside):
        refused = read_settings(job(folder), roots, None)
        assert refused.lora is None
        assert [problem.pointer for problem in refused.problems] == ["/model/adapter"]
        assert "outside the allowed storage roots" in refused.problems[0].message or folder == inside
    assert read_settings(spec(), roots, None).lora is None


def test_inference_takes_the_settings_of_the_folder(tmp_path: Path) -> None:
    model = {"path": "/models/base", "adapter": str(write_parts(tmp_path)), "dtype": "fp32"}
    found = with_adapter(parse_any(infer_spec() | {"model": model}))
    assert isinstance(found, InferJobSpec)
    assert found.model.lora is not None
    assert load(dump(found)) == found
    assert found.run.model.lora == found.model.lora
    with pytest.raises(SpecError, match="is not supported with kind: infer, which trains nothing; remove lora"):
        parse_any(infer_spec() | {"model": {"path": "/models/base", "lora": {}, "dtype": "fp32"}})


def test_run_without_the_service_keeps_the_settings_in_its_directory(tmp_path: Path) -> None:
    folder, run_dir = write_parts(tmp_path / "a"), RunDir(tmp_path / "run")
    given = job(folder)
    found = resolve_adapter(given, run_dir)
    assert found == with_adapter(given)
    run_dir.write_spec(found)
    shutil.rmtree(folder)
    assert resolve_adapter(given, run_dir) == found
    with pytest.raises(ModelError, match="not found; give a folder that save_pretrained of peft wrote"):
        resolve_adapter(job(tmp_path / "other"), run_dir)


def test_names_and_lists_beyond_the_limits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_parts(tmp_path / "layers", layers_to_transform=list(range(100_001)))
    with pytest.raises(ModelError, match="has 100001 entries in layers_to_transform; at most 100000 are read"):
        read_adapter(folder)
    folder = write_parts(tmp_path / "name", target_parameters=["x.weight"])
    save_file({f"base_model.model.x{'.base_layer' * 20_000}.lora_A.weight": torch.zeros(1)}, folder / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"holds a tensor whose name, base_model\.model\.x.*…, has 220032 characters"):
        read_adapter(folder)
    monkeypatch.setattr("train_loop.model.load._MOST_TENSORS", 3)
    save_file({f"t{number}": torch.zeros(1) for number in range(4)}, folder / WEIGHTS_FILE)
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors holds 4 tensors; at most 3 are read, split the"):
        read_adapter(folder)


def test_holders_of_adapted_parameters_are_found_by_the_ends_of_their_names() -> None:
    names = ["a.b.experts", "a.b.experts.base_layer.base_layer", "experts", "a.other_experts", "a.b.q_proj"]
    tensors: dict[str, Any] = {f"{name}.lora_A.weight": None for name in names}
    assert [*_adapted(tensors, ["b.experts.up", "experts.down"])] == ["a.other_experts", "a.b.q_proj"]
    # A name of many parts among many parameters.
    deep = "x" + ".base_layer" * 20_000
    assert [*_adapted({f"{deep}.lora_A.weight": None}, ["y.up"])] == [deep]  # type: ignore[dict-item]
