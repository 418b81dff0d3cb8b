"""Adapters from folders that peft wrote: the first step, resumes and inference, compared with peft's own forward."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.support.builders.any_size import GPT2
from tests.support.builders.folders import write_model
from tests.support.builders.small_runs import LENGTH, STEPS, lines, numbers, run
from tests.support.builders.specs import infer_spec, spec
from tests.support.families.families import small
from tests.support.ranks.adapters import Step, adapter_step
from tests.support.ranks.gradients import random_rows
from tests.support.ranks.peft_folders import peft_logits, write_adapters, write_parts
from tests.support.ranks.torchrun import write_tokens
from train_loop import train
from train_loop.conformance.measure import whole
from train_loop.data.dataset import IGNORE
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.read_results import read_rows
from train_loop.data.stream.local import local_stream
from train_loop.infer import infer
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.model.lora.adapters import trained_parameters
from train_loop.model.lora.peft_config import with_adapter
from train_loop.model.lora.stored import stored_name
from train_loop.run_dir import RunDir
from train_loop.spec import AnyJobSpec, InferJobSpec, JobSpec, parse_any

CallRanks = Callable[..., Any]
ROWS = random_rows(8, 32, vocab=200, packed=False)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {},
    "gpt2": GPT2 | {"n_embd": 32} | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0),
    "bloom": small("bloom") | {"vocab_size": 200},
    "qwen3_moe": {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}
PEFT: dict[str, dict[str, Any]] = {
    "llama": {"r": 3, "lora_alpha": 6, "use_dora": True, "modules_to_save": ["lm_head"]}
    | {"target_modules": r".*\.(q_proj|v_proj|down_proj)"},
    "qwen3": {"r": 3, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "gpt2": {"r": 4, "use_rslora": True, "fan_in_fan_out": True, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    "bloom": {"r": 2, "target_modules": "all-linear", "modules_to_save": ["norm"]},
    "qwen3_moe": {"r": 3, "target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, adapters of each, and rows."""
    home = tmp_path_factory.mktemp("peft")
    for name, config in MODELS.items():
        write_adapters(write_model(home / name, **config), home / f"{name}-adapter", **PEFT[name])
    write_tokens(home / "d.parquet", rows=24, length=LENGTH, vocab=200)
    write_tokens(home / "rows.parquet", rows=7, length=(1, LENGTH), vocab=200)
    return home


def adapted(home: Path, name: str, **model: Any) -> dict[str, Any]:
    return {"path": str(home / name), "adapter": str(home / f"{name}-adapter"), "dtype": "fp32"} | model


def train_job(home: Path, name: str, tp: int = 1, **model: Any) -> JobSpec:
    job = spec(
        model={"config": None, **adapted(home, name, **model)},
        training={"global_batch_size": 8, "per_device_train_batch_size": 1},
        data={"packing": False},
        strategy={"tp_size": tp},
        scaling={"num_workers": 2},
    )
    return with_adapter(job).run


def first_step(job: JobSpec) -> Step:
    return adapter_step(job, ROWS, filled=False)


@pytest.mark.parametrize(
    ("model", "load", "tp"),
    [("llama", "every_rank", 1), ("qwen3", "every_rank", 2), ("gpt2", "rank0", 1), ("qwen3_moe", "every_rank", 1)],
)
def test_first_step_equals_that_of_peft(call_ranks: CallRanks, home: Path, model: str, load: str, tp: int) -> None:
    job = train_job(home, model, tp, load=load)
    loss, _, weights = call_ranks(2, first_step, job)
    ids, labels = (torch.from_numpy(values).long() for values in (ROWS.input_ids, ROWS.labels))
    logits = peft_logits(home / model, home / f"{model}-adapter", ids.tolist())
    total = sum(
        cross_entropy(row[:-1], wanted[1:], ignore_index=IGNORE, reduction="sum")
        for row, wanted in zip(logits, labels, strict=True)
    )
    assert loss == pytest.approx(float(total) / int((labels[:, 1:] != IGNORE).sum()), rel=1e-6)
    stored = load_file(home / f"{model}-adapter" / "adapter_model.safetensors")
    found = {f"base_model.model.{stored_name(name)}": value for name, value in weights.items()}
    assert found.keys() == stored.keys()
    assert [name for name, value in stored.items() if not torch.equal(found[name], value)] == []


def train_from(home: Path, name: str, model: dict[str, Any], steps: int = STEPS) -> dict[str, Tensor]:
    """Train from a folder with adapters on the existing ranks; return what is trained, by peft's names."""
    kept = list[Run]()

    def keep(*arguments: Any) -> Run:
        kept.append(build_run(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_run", keep)
        run(home / "d.parquet", home / name, model={"config": None, **model}, max_steps=steps, warmup_steps=1)
    trained = trained_parameters(kept[0].state.model)
    return {stored_name(name): whole(p.detach()) for name, p in trained.items()}


def infer_on(home: Path, name: str, job: AnyJobSpec) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    assert isinstance(job, InferJobSpec)
    session = Session(rank, world, 0, 1, RunDir(home / name), local_stream, end_event="work_ended")
    infer(job, session, find_dataset(job.run, home))


def infer_job(home: Path, world: int, model: dict[str, Any], **output: Any) -> AnyJobSpec:
    raw = infer_spec(
        data={"train": {"path": str(home / "rows.parquet")}},
        infer={"output": "logprobs", "rows_per_shard": 4, "batch_size": 2} | output,
        scaling={"num_workers": world},
    )
    return parse_any(raw | {"model": model})


def check(home: Path, name: str, base: str, adapter: Path) -> None:
    """Compare log probabilities with those of peft."""
    ids = pq.read_table(home / "rows.parquet")["ids"].to_pylist()
    found = list(read_rows(RunDir(home / name)))
    for row, tokens, logits in zip(found, ids, peft_logits(home / base, adapter, ids), strict=True):
        expected = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:]).long()[:, None])[:, 0]
        np.testing.assert_allclose(row["logprobs"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "bloom"])
def test_inference_from_a_folder_equals_peft(call_ranks: CallRanks, home: Path, model: str) -> None:
    for world in (1, 2):
        job = with_adapter(infer_job(home, world, adapted(home, model)))
        call_ranks(world, infer_on, home, f"{model}-{world}", job)
        check(home, f"{model}-{world}", model, home / f"{model}-adapter")


def test_run_goes_on_without_the_folder_and_another_from_its_adapters(call_ranks: CallRanks, home: Path) -> None:
    given = with_adapter(infer_job(home, 1, adapted(home, "llama"))).model
    model = adapted(home, "llama", lora=given.lora and given.lora.model_dump(mode="json"))
    call_ranks(2, train_from, home, "whole", model)
    call_ranks(2, train_from, home, "parts", model, 3)
    away = home / "llama-adapter"
    shutil.move(away, home / "moved")
    trained = call_ranks(2, train_from, home, "parts", model)
    shutil.move(home / "moved", away)
    whole_run, parts = ([numbers(line) for line in lines(home / name)] for name in ("whole", "parts"))
    assert whole_run == parts
    start = load_file(away / "adapter_model.safetensors")
    assert all((value != start[f"base_model.model.{name}"]).any() for name, value in trained.items())
    exported = write_parts(home / "exported", trained, **PEFT["llama"])
    _, _, weights = call_ranks(2, first_step, train_job(home, "llama", adapter=str(exported)))
    assert [name for name, value in weights.items() if not torch.equal(trained[stored_name(name)], value)] == []


def test_generation_with_adapters_equals_peft(call_ranks: CallRanks, home: Path) -> None:
    generation = {"max_new_tokens": 4, "stop_tokens": []}
    job = infer_job(home, 1, adapted(home, "llama"), output="generate", generation=generation)
    call_ranks(1, infer_on, home, "generated", with_adapter(job))
    for row in read_rows(RunDir(home / "generated")):
        tokens = list(row["ids"])
        for _ in range(4):
            (logits,) = peft_logits(home / "llama", home / "llama-adapter", [tokens])
            tokens.append(int(logits[-1].argmax()))
        assert row["generated_tokens"] == tokens[-4:]
