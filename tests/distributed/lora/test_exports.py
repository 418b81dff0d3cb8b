"""Exports of adapters: peft and transformers alone compute what the trained model computes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.builders.any_size import GPT2
from tests.support.builders.folders import write_model
from tests.support.builders.small_runs import LENGTH, STEPS, job_of, run
from tests.support.families.families import small
from tests.support.ranks.adapters import round_weights
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.checkpoint.export.huggingface import export
from train_loop.errors import ModelError, UserError
from train_loop.run_dir import ExportWish, RunDir, read_lines

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # it reads a deprecated property
CallRanks = Callable[..., Any]
ADAPTER = ExportWish(dtype="fp32", form="adapter")
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "dora": {},
    "gpt2": GPT2 | {"n_embd": 32},
    "glm4_moe": small("glm4_moe") | {"vocab_size": 200},
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
LORA: dict[str, dict[str, Any]] = {
    "qwen3": {"r": 2, "modules_to_save": ["lm_head"]},
    "dora": {"r": 2, "use_dora": True, "target_modules": ["q_proj", "down_proj"], "layers": [1]},
    "gpt2": {"r": 2, "use_rslora": True},
    "glm4_moe": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["mlp.gate"]},
    "qwen3_moe": {
        "r": 2,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}
IDS = torch.arange(1, 25).view(2, 12)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=100)
    return folder


def train_adapters(
    home: Path, name: str, base: Path | None, lora: dict[str, Any], quantized: str | None = None, tp: int = 1
) -> None:
    """Train on the existing ranks, with the spec in the run directory."""
    model: dict[str, Any] = {"lora": lora, "dtype": "fp32", "quantize_base": quantized}
    model |= {"path": str(base), "config": None} if base else {}
    training: dict[str, Any] = {"learning_rate": 1e-2, "ema_decay": 0.5}
    if dist.get_rank() == 0:
        parts: dict[str, Any] = {"model": model, "training": training, "strategy": {"tp_size": tp}}
        RunDir(home / name).write_spec(job_of(home / "d.parquet", dist.get_world_size(), **parts))
    run(home / "d.parquet", home / name, model=model, strategy={"tp_size": tp}, **training)


def with_peft(base: Path, folder: Path) -> Any:
    """Return transformers' model with the exported adapters, as a user loads them."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
        return found


@pytest.mark.parametrize("name", MODELS)
def test_peft_and_the_merged_model_have_the_trained_weights(call_ranks: CallRanks, home: Path, name: str) -> None:
    base, run_dir = write_model(home / f"{name}-base", **MODELS[name]), RunDir(home / name)
    call_ranks(2, train_adapters, home, name, base, LORA[name], None, 2 if name == "qwen3" else 1)
    folder = export(run_dir, STEPS, ADAPTER)
    loaded = with_peft(base, folder)
    trained: dict[str, Tensor] = load_checkpoint(run_dir.root, STEPS)["model"]
    own = loaded.base_model.model.state_dict()
    # Routers have buffers, too.
    kept = {key: re.sub(r"(lm_head|mlp\.gate)(?=\.)", r"\1.modules_to_save.default", key) for key in trained}
    assert all(torch.equal(own[kept[key]], value) for key, value in trained.items())
    assert any(value.any() for key, value in trained.items() if "lora_B" in key)
    merged = export(run_dir, STEPS, ExportWish(dtype="fp32", form="merged"))
    found = AutoModelForCausalLM.from_pretrained(merged).eval()
    torch.testing.assert_close(logits(found), logits(loaded), rtol=1e-5, atol=1e-5)
    assert (logits(found) - logits(AutoModelForCausalLM.from_pretrained(base).eval())).abs().max() > 1e-3


def test_merged_weights_are_rounded_once_and_the_difference_is_told(call_ranks: CallRanks, home: Path) -> None:
    base, run_dir, wish = home / "qwen3-base", RunDir(home / "qwen3"), ExportWish(dtype="bf16", form="merged")
    if not run_dir.root.exists():
        call_ranks(2, train_adapters, home, "qwen3", write_model(base), LORA["qwen3"])
    found = AutoModelForCausalLM.from_pretrained(export(run_dir, STEPS, wish), dtype=torch.bfloat16)
    exact = with_peft(base, export(run_dir, STEPS, ADAPTER)).merge_and_unload().state_dict()
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in found.state_dict().items())
    status = run_dir.exports.status(STEPS, wish, now=0.0)
    assert status is not None
    assert status.difference is not None
    assert 1e-5 < status.difference < 0.1
    text = (run_dir.exports.folder(STEPS, wish) / "README.md").read_text()
    assert f"by at most {status.difference:.3g}" in text
    lines = (line for attempt in run_dir.attempts() for line in read_lines(attempt.events))
    events = {(line["form"], line["dtype"]): line for line in lines if line["event"] == "exported"}
    assert events["merged", "bf16"]["difference"] == status.difference
    assert "difference" not in events["adapter", "fp32"]


def test_adapters_of_a_quantised_base_are_added_to_its_restored_weights(call_ranks: CallRanks, home: Path) -> None:
    base, run_dir = write_model(home / "quantised-base"), RunDir(home / "quantised")
    call_ranks(2, train_adapters, home, "quantised", base, {"r": 2, "target_modules": ["q_proj"]}, "int8")
    with pytest.raises(UserError, match=r"with weights in int8 \(model.quantize_base\).*; choose form dequantized"):
        export(run_dir, STEPS, ExportWish(dtype="fp32", form="merged"))
    rounded = AutoModelForCausalLM.from_pretrained(base)
    round_weights(rounded.model.layers, "int8")
    model = peft.PeftModel.from_pretrained(rounded, str(export(run_dir, STEPS, ADAPTER))).eval()
    found = AutoModelForCausalLM.from_pretrained(export(run_dir, STEPS, ExportWish(dtype="fp32", form="dequantized")))
    torch.testing.assert_close(logits(found.eval()), logits(model), rtol=1e-5, atol=1e-5)
    exact = model.merge_and_unload().state_dict()
    assert all(torch.equal(value, exact[name]) for name, value in found.state_dict().items() if "q_proj" not in name)
    assert (logits(found) - logits(with_peft(base, run_dir.exports.folder(STEPS, ADAPTER)))).abs().max() > 1e-4
    readmes = {
        form: (run_dir.exports.folder(STEPS, ExportWish(dtype="fp32", form=form)) / "README.md").read_text()
        for form in ("adapter", "dequantized")
    }
    assert "quantised-base, rounded to int8 and restored" in readmes["dequantized"]
    assert "The run computed with the base in int8" in readmes["adapter"]


def test_average_of_adapters_on_random_weights_is_merged(call_ranks: CallRanks, home: Path) -> None:
    call_ranks(2, train_adapters, home, "random", None, {"r": 2})
    run_dir = RunDir(home / "random")
    plain, average = (
        AutoModelForCausalLM.from_pretrained(
            export(run_dir, STEPS, ExportWish(dtype="fp32", weights=one, form="merged"))
        )
        for one in ("model", "ema")
    )
    assert (logits(plain) - logits(average)).abs().max() > 0
    merged = run_dir.exports.folder(STEPS, ExportWish(dtype="fp32", form="merged"))
    assert "\nRandom weights of training.seed 0, with adapters (LoRA, r=2" in (merged / "README.md").read_text()
    text = (export(run_dir, STEPS, ADAPTER) / "README.md").read_text()
    assert "peft cannot load it, because no file has these weights: export with form merged" in text


def test_changed_base_and_missing_form_are_refused(call_ranks: CallRanks, home: Path) -> None:
    base, run_dir = write_model(home / "gpt2-base", **MODELS["gpt2"]), RunDir(home / "gpt2")
    if not run_dir.root.exists():
        call_ranks(2, train_adapters, home, "gpt2", base, LORA["gpt2"])
    with pytest.raises(UserError, match=r"trains adapters .*; export with form adapter, for peft, or merged"):
        export(run_dir, STEPS, ExportWish(dtype="fp32"))
    write_model(base, **MODELS["gpt2"], initializer_range=0.5)
    with pytest.raises(ModelError, match=r"now has .*; restore its files, or start a new run"):
        export(run_dir, STEPS, ExportWish(dtype="fp16", form="merged"))
