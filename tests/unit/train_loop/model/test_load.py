"""Weights from a folder: loaded as transformers loads them, or rejected by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from tests.support.builders.folders import write_model
from tests.support.builders.specs import spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.model.families.causal.build import build_model
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.load import give_weights, match_folder, read_headers
from train_loop.spec import ModelSpec

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3"},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
    "gemma 3, scaled embeddings": {"model_type": "gemma3_text"},
    "gpt2, a prefix of its own": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt-neox, another name for the head": {"model_type": "gpt_neox"},
}


def model_spec(folder: Path) -> ModelSpec:
    return spec(model={"config": None, "path": folder.as_uri()}).model


def load(folder: Path) -> PreTrainedModel:
    model = build_model(model_spec(folder))
    give_weights(model, CAUSAL.anatomy(copy.deepcopy(model)), model_spec(folder), seed=0, device=torch.device("cpu"))
    return model.eval()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(48).view(2, 24) * 7).logits
    return result


def assert_as_transformers_loads(folder: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    assert torch.equal(logits(load(folder)), logits(expected))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    assert_as_transformers_loads(write_model(tmp_path, **FAMILIES[family]))


def test_text_part_is_loaded_from_the_folder_of_a_model_with_vision(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**small("qwen3_5"))
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    assert_as_transformers_loads(tmp_path)
    unused = match_folder(CAUSAL.build(model_spec(tmp_path)), tmp_path).unused
    assert {name.split(".")[1] for name in unused} == {"visual"}


def test_bf16_folder_is_cast_to_the_parameter_dtype(tmp_path: Path) -> None:
    assert_as_transformers_loads(write_model(tmp_path, dtype=torch.bfloat16, file_size="20KB"))


def test_config_of_an_older_version_is_equivalent(tmp_path: Path) -> None:
    write_model(tmp_path, model_type="llama")
    rewrite_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=LLAMA3_ROPE, torch_dtype="bfloat16")
    assert_as_transformers_loads(tmp_path)


def rewrite_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes a field."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def test_base_model_names_are_accepted(tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(write_model(tmp_path), strip)
    assert_as_transformers_loads(tmp_path)


def test_tensors_computed_by_the_model_are_ignored(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 7.0)

    rewrite(write_model(tmp_path, tie_word_embeddings=True), add)
    assert_as_transformers_loads(tmp_path)


def test_tied_weight_is_found_under_its_other_name(tmp_path: Path) -> None:
    rewrite(
        write_model(tmp_path, tie_word_embeddings=True),
        lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}),
    )
    assert_as_transformers_loads(tmp_path)


def test_tied_model_with_a_different_head_is_rejected(tmp_path: Path) -> None:
    rewrite(
        write_model(tmp_path, tie_word_embeddings=True),
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
    )
    with pytest.raises(ModelError, match=r"lm_head\.weight in .* differs from .*; set tie_word_embeddings to"):
        load(tmp_path)


def test_weights_that_may_be_missing_are_initialised(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"))
    model = build_model(model_spec(tmp_path))
    model._keys_to_ignore_on_load_missing = {r"up_proj"}
    give_weights(model, CAUSAL.anatomy(copy.deepcopy(model)), model_spec(tmp_path), seed=0, device=torch.device("cpu"))
    assert 0.01 < model.get_parameter("model.layers.0.mlp.up_proj.weight").std() < 0.03


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        match_folder(CAUSAL.build(model_spec(folder)), folder)
    return str(caught.value)


def test_mismatch_is_reported_with_shapes(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["model.norm.weight"] = torch.ones(31)
        tensors.update({f"score.{n}": torch.ones(2, n) for n in range(5)})

    rewrite(write_model(tmp_path), spoil)
    assert refusal(tmp_path) == (
        f"the tensors in {tmp_path} do not match Qwen3ForCausalLM of its config.json: missing: lm_head.weight "
        "[384, 32]; unexpected: score.0 [2, 0], score.1 [2, 1], score.2 [2, 2] and 2 more; wrong shape: "
        "model.norm.weight is [31], expected [32]; give the folder of a causal language model with the config.json "
        "that belongs to it"
    )


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def leave_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def index(weight_map: Any, *, rest: Callable[[Path], None] = remove_weights) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        rest(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return spoil


def rename_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            remove_weights,
            "holds neither model.safetensors nor model.safetensors.index.json; give a folder with weights",
        ),
        (
            leave_pickle,
            "but pytorch_model.bin, and jobs read no pickles; run `trainshed weights convert (.*) \\1-safetensors`",
        ),
        (truncate, "model.safetensors is not a complete safetensors file: .*; copy it again"),
        (index(["x"]), "weight_map not found in .*; copy it again"),
        (
            index({"x": "../../etc/passwd"}),
            "names files that are not safetensors files of the folder: ../../etc/passwd",
        ),
        (index({"x": "gone.safetensors"}), "gone.safetensors not found; copy the folder again"),
        (index({"x": "a.safetensors"}, rest=rename_weights), "names tensors that its files do not contain: x; copy it"),
    ],
)
def test_folder_without_complete_safetensors_is_rejected(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(write_model(tmp_path))
    with pytest.raises(ModelError, match=message):
        match_folder(CAUSAL.build(model_spec(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "model.safetensors is not a complete safetensors file: .*; copy it again"),
        (remove_weights, "model.safetensors not found; copy the folder again"),
    ],
)
def test_weights_that_are_lost_after_their_headers_were_read_are_named(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    found = read_headers(write_model(tmp_path))
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message):
        next(iter(found.values())).read((slice(None),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "holds quantised weights .fp8., which cannot be"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "m.C"}}, "needs custom code .auto_map., and the code in a"),
        ({"model_type": "mine"}, "not support model_type=mine; choose a supported one, for example qwen3 or llama"),
        ({"model_type": None}, "model_type not found in .*config.json; add it"),
    ],
)
def test_untrainable_config_is_rejected(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    rewrite_config(write_model(tmp_path), **fields)
    with pytest.raises(ModelError, match=message):
        build_model(model_spec(tmp_path))


def test_code_in_the_folder_of_a_known_model_is_not_run(tmp_path: Path) -> None:
    rewrite_config(write_model(tmp_path), auto_map={"AutoConfig": "boom.C", "AutoModelForCausalLM": "boom.M"})
    (tmp_path / "boom.py").write_text("raise SystemExit('it was run')")
    assert_as_transformers_loads(tmp_path)


def test_folder_without_a_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json not found in .*; give a model's folder as save_pretrained"):
        build_model(model_spec(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON: .*; copy it again"):
        build_model(model_spec(tmp_path))


def test_old_masks_of_gpt2_are_left_out_and_named(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "transformer.h.0.attn"
    mask = {f"{layer}.bias": torch.ones(1, 1, 48, 48), f"{layer}.masked_bias": torch.tensor(-1e4)}
    save_file(stored | mask, tmp_path / "model.safetensors", metadata={"format": "pt"})
    own = CAUSAL.build(model_spec(tmp_path))
    assert sorted(match_folder(own, tmp_path).unused) == sorted(mask)
    assert_as_transformers_loads(tmp_path)
    save_file(stored | {f"{layer}.masked_bias": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected: transformer\.h\.0\.attn\.masked_bias"):
        match_folder(own, tmp_path)
