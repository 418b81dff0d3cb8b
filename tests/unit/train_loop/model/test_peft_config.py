"""Folders with adapters: their settings as a spec has them, all that is refused, and their tensors by shape."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.builders.any_size import MOE
from tests.support.builders.folders import write_model
from tests.support.builders.peft_folders import CONFIG, write_parts
from tests.support.builders.specs import TINY, infer_spec, may_read, raw_spec, spec
from train_loop.errors import ModelError
from train_loop.model.families.choose import family_of
from train_loop.model.lora.adapters import inject_adapters, trained_parameters
from train_loop.model.lora.peft_config import other_base, read_adapter, with_adapter
from train_loop.model.lora.stored import Swapped, match_adapters, stored_name
from train_loop.preflight.adapters import read_settings
from train_loop.preflight.checks import answer, check_model
from train_loop.spec import InferJobSpec, JobSpec, LoraSpec, SpecError, dump, load, parse, parse_any

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
        f"model.lora contradicts {folder}/adapter_config.json: r=4 and r=2; target_modules=[q_proj] and target_modules="
        "[q_proj, v_proj]; use_dora=True and use_dora=False; remove model.lora, whose settings the folder has"
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
    with pytest.raises(SpecError, match=r"tp_size=2 is not proven with model\.adapter; change it, or remove adapter"):
        job(tmp_path, strategy={"tp_size": 2}, scaling={"num_workers": 2})
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


def adapted(lora: dict[str, Any], **config: Any) -> Any:
    """Return a model on meta with adapters."""
    made = spec(model={"config": TINY | config, "lora": lora})
    anatomy = family_of(made).build(made.model)
    assert made.model.lora is not None
    inject_adapters(anatomy, made.model.lora)
    return anatomy.model


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {stored_name(name): torch.randn(p.shape) for name, p in trained_parameters(model).items()}


def test_tensors_that_do_not_match_are_refused_by_name(tmp_path: Path) -> None:
    model = adapted({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "use_dora": True})
    tensors = tensors_of(model)
    layer = "model.layers.0.self_attn.q_proj"
    assert {f"{layer}.lora_A.weight", f"{layer}.lora_magnitude_vector", "lm_head.weight"} <= tensors.keys()
    match_adapters(model, read_adapter(write_parts(tmp_path, tensors)))
    tensors["x.lora_A.weight"] = tensors.pop(f"{layer}.lora_A.weight")
    tensors["lm_head.weight"] = torch.zeros(3, 4)
    tensors[f"{layer}.lora_B.weight"] = tensors[f"{layer}.lora_B.weight"].to(torch.int8)
    with pytest.raises(ModelError) as error:
        match_adapters(model, read_adapter(write_parts(tmp_path, tensors)))
    assert (
        f"do not match the adapters of Qwen3ForCausalLM: missing: base_model.model.{layer}.lora_A.weight [2, 32]; left "
        "over: base_model.model.x.lora_A.weight [2, 32]; wrong shape: base_model.model.lm_head.weight is [3, 4], "
    ) in str(error.value)
    assert f"no floats: base_model.model.{layer}.lora_B.weight has dtype I8; give the folder of" in str(error.value)


def test_experts_of_an_older_peft_are_turned_by_their_shapes(tmp_path: Path) -> None:
    config = {name: value for name, value in MOE.items() if name != "model_type"} | {"model_type": MOE["model_type"]}
    model = adapted({"r": 3, "target_modules": [], "target_parameters": EXPERTS}, **config)
    wanted = trained_parameters(model)
    name = next(one for one in wanted if "lora_A" in one and "base_layer" in one)
    experts, twin = MOE["num_experts"], name.replace("lora_A", "lora_B")
    tensors = tensors_of(model)
    for one in [name for name in wanted if "lora_A" in name]:
        other = one.replace("lora_A", "lora_B")
        # peft before 0.19.1 took the outputs of a tensor [experts, out, in] for its inputs.
        tensors[stored_name(one)] = torch.randn(wanted[one].shape[0], wanted[other].shape[0])
        tensors[stored_name(other)] = torch.randn(wanted[one].shape[1], wanted[other].shape[1])
    folder = write_parts(tmp_path, tensors, peft_version="0.18.1")
    homes = match_adapters(model, read_adapter(folder))
    a, b = homes[name], homes[twin]
    assert isinstance(a, Swapped)
    new_a, new_b = (one.read((slice(None), slice(None))) for one in (a, b))
    assert (new_a.shape, new_b.shape) == (wanted[name].shape, wanted[twin].shape)
    old_a, old_b = tensors[stored_name(name)], tensors[stored_name(twin)]
    old = torch.einsum(
        "ore,eri->eio", old_b.reshape(len(old_b), -1, experts), old_a.reshape(experts, -1, old_a.shape[1])
    )
    new = torch.einsum(
        "ore,eri->eoi", new_b.reshape(len(new_b), -1, experts), new_a.reshape(experts, -1, new_a.shape[1])
    )
    torch.testing.assert_close(new, old)
    assert torch.equal(a.read((slice(1, 3), slice(0, 2))), new_a[1:3, :2])
    with pytest.raises(ModelError, match="wrong shape"):
        match_adapters(model, read_adapter(write_parts(tmp_path, tensors)))


def test_square_experts_of_an_older_peft_are_refused(tmp_path: Path) -> None:
    model = adapted(
        {"r": 3, "target_modules": [], "target_parameters": ["experts.down_proj"]},
        **(MOE | {"moe_intermediate_size": MOE["hidden_size"]}),
    )
    tensors = tensors_of(model)
    match_adapters(model, read_adapter(write_parts(tmp_path, tensors, peft_version="0.19.1")))
    with pytest.raises(ModelError, match=r"was written by a peft before 0\.19\.1, whose inputs and outputs of experts"):
        match_adapters(model, read_adapter(write_parts(tmp_path, tensors, peft_version="0.18.0")))


def test_preflight_counts_adapters_of_a_folder_and_reports_their_tensors(tmp_path: Path) -> None:
    base, lora = write_model(tmp_path / "base"), {"r": 2, "target_modules": ["q_proj"]}
    tensors = tensors_of(adapted(lora))
    folder = write_parts(tmp_path / "a", tensors)
    made = spec(model={"config": None, "path": str(base), "adapter": str(folder)})
    shape, problems = check_model(with_adapter(made).run, may_read(str(tmp_path)))
    assert (problems, shape and shape.trained) == ([], sum(value.numel() for value in tensors.values()))
    name, value = tensors.popitem()
    write_parts(folder, tensors)
    _, problems = check_model(with_adapter(made).run, may_read(str(tmp_path)))
    assert [one.pointer for one in problems] == ["/model/adapter"]
    assert f"missing: base_model.model.{name} {list(value.shape)}; give the folder" in problems[0].message
    answered = answer(
        {"spec": json.loads(dump(made)), "read_policy": may_read(str(tmp_path)).model_dump(), "parent": None}
    )
    assert answered["lora"] == read_adapter(folder).lora.model_dump(mode="json")
    assert "/model/adapter" in [one["pointer"] for one in answered["problems"]]


def test_index_of_several_files_is_read(tmp_path: Path) -> None:
    model = adapted({"r": 2, "target_modules": ["q_proj"]})
    tensors = {f"base_model.model.{name}": value for name, value in tensors_of(model).items()}
    write_parts(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    save_file(tensors, tmp_path / "adapter_model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "adapter_model-00001-of-00001.safetensors")}
    (tmp_path / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    assert len(match_adapters(model, read_adapter(tmp_path))) == len(tensors)
