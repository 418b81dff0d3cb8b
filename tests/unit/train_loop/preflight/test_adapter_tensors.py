"""Tensors in folders with adapters, compared with a model by name and shape; those of older versions of peft."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.builders.any_size import MOE
from tests.support.builders.folders import write_model
from tests.support.builders.specs import TINY, may_read, spec
from tests.support.families.families import small
from tests.support.ranks.peft_folders import write_parts
from train_loop.errors import ModelError
from train_loop.model.families.choose import family_of
from train_loop.model.lora.adapters import inject_adapters, trained_parameters
from train_loop.model.lora.peft_config import read_adapter, with_adapter
from train_loop.model.lora.stored import Swapped, match_adapters, stored_name
from train_loop.preflight.checks import answer
from train_loop.preflight.model import check_model
from train_loop.spec import dump

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(lora: dict[str, Any], **config: Any) -> Any:
    """Return a model on meta with adapters."""
    made = spec(model={"config": TINY | config, "lora": lora})
    anatomy = family_of(made).build(made.model)
    inject_adapters(anatomy, made.model)
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


def test_adapters_above_random_weights_that_no_file_has_are_refused(tmp_path: Path) -> None:
    """As those of heads of encoders that earlier versions exported."""
    model = adapted({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    tensors = tensors_of(model)
    tensors["lm_head.lora_A.weight"] = tensors.pop("lm_head.weight")[:2]
    with pytest.raises(ModelError) as error:
        match_adapters(model, read_adapter(write_parts(tmp_path, tensors)))
    assert str(error.value).endswith(
        "its adapters are above weights of lm_head that were random and are in no file, so that their outputs cannot "
        "be computed again; train adapters anew"
    )


def test_buffers_of_modules_that_are_trained_whole_are_read(tmp_path: Path) -> None:
    model = adapted({"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]}, **small("glm4_moe"))
    buffers = {name: one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")}
    assert buffers
    stored = {name: torch.ones(one.shape) for name, one in buffers.items()}
    homes = match_adapters(model, read_adapter(write_parts(tmp_path, tensors_of(model) | stored)))
    assert homes.keys() == trained_parameters(model).keys() | buffers.keys()


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
    rows = {"columns": {"input_ids": "ids"}, "packing": False}
    made = spec(model={"config": None, "path": str(base), "adapter": str(folder)}, data=rows)
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
