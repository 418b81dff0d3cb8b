"""Exported checkpoints: Hugging Face folders with which transformers computes the trained model's outputs."""

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.support.builders.exports import save_a_run, save_a_run_of
from tests.support.builders.folders import write_tokenizer
from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY
from tests.support.families.families import small
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import write_tokens
from train_loop.checkpoint.export.full import WAYS, load_model
from train_loop.checkpoint.export.huggingface import export
from train_loop.errors import CheckpointError, UserError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.load import give_weights
from train_loop.run_dir import ExportDir, ExportStatus, ExportWish, JsonLines, RunDir, read_lines
from train_loop.spec import ModelSpec
from train_loop.weights.inputs import find_inputs
from train_loop.weights.write import write_weights
from trainshed.cli.main import app

FP32 = ExportWish(dtype="fp32")
MIB = 2**20


class Trained(NamedTuple):
    """A run with a checkpoint of step 3, and the checkpoint's content."""

    run_dir: RunDir
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]
    tied: bool


@pytest.fixture(scope="module", params=drawn(["tied", "untied"], 1))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, tied = tmp_path_factory.mktemp("trained"), request.param == "tied"
    write_tokens(folder / "d.parquet", rows=64, length=32, vocab=TINY["vocab_size"])
    run_dir = RunDir(folder / "run")
    weights, averages = on_ranks(2, save_a_run, folder, run_dir, {"tie_word_embeddings": tied})[0]
    return Trained(run_dir, weights, averages, tied)


def test_transformers_computes_the_logits_of_the_trained_model(trained: Trained) -> None:
    folder = export(trained.run_dir, 3, FP32)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    model, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading_info
    assert type(model).__name__ == "Qwen3ForCausalLM"
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY | {"tie_word_embeddings": trained.tied}), dtype=torch.float32
    )
    reference.load_state_dict(trained.weights)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference.eval()(ids).logits)


def test_large_weights_are_split_into_files_with_an_index(trained: Trained) -> None:
    folder = export(trained.run_dir, 3, ExportWish(dtype="bf16"), shard_bytes=20_000)
    files = sorted(folder.glob("model-*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert len(files) > 2
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
        assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        assert sum(tensor.nbytes for tensor in tensors) <= 20_000 or len(tensors) == 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in model.parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(weight, trained.weights[name].bfloat16()), name


def test_weight_average_can_be_exported(trained: Trained) -> None:
    model = AutoModelForCausalLM.from_pretrained(export(trained.run_dir, 3, ExportWish(dtype="fp32", weights="ema")))
    found = dict(model.named_parameters())
    assert found.keys() == trained.averages.keys()
    for name, average in trained.averages.items():
        assert torch.equal(found[name], average), name


def test_export_reports_its_status_and_pins_the_checkpoint(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, wish, pinned = trained.run_dir, ExportWish(dtype="fp16"), list[set[int]]()
    build = CAUSAL.build

    def record_pins_and_build(model: ModelSpec) -> Anatomy:
        pinned.append(run_dir.pins())
        return build(model)

    monkeypatch.setattr(CAUSAL, "build", record_pins_and_build)
    folder = export(run_dir, 3, wish)
    assert pinned == [{3}]
    assert run_dir.pins() == set()
    status = run_dir.exports.status(3, wish, now=0)
    assert status is not None
    assert (status.state, status.progress) == ("done", 1.0)
    assert export(run_dir, 3, wish) == folder
    assert len(pinned) == 1, "an existing export was rebuilt"


def test_export_interrupted_before_its_final_status_is_done(trained: Trained) -> None:
    run_dir, wish = trained.run_dir, ExportWish(dtype="fp16", weights="ema")
    folder = export(run_dir, 3, wish)
    left = folder.with_name(f"{folder.name}.tmp-left")
    left.mkdir()
    run_dir.exports.write(ExportStatus(step=3, wish=wish, state="running", time=100.0))
    assert export(run_dir, 3, wish) == folder
    status = run_dir.exports.status(3, wish, now=0)
    assert status is not None
    assert (status.state, status.progress) == ("done", 1.0)
    shutil.rmtree(folder)
    assert run_dir.exports.status(3, wish, now=0) is None, "a removed export is reported as present"
    assert export(run_dir, 3, wish) == folder
    assert not left.exists()


def renames_folder(path: Path, target: Path) -> bool:
    return path.name.startswith(f"{target.name}.tmp-")


def is_last_status(exports: ExportDir, status: ExportStatus) -> bool:
    return status.state == "done"


@pytest.mark.parametrize(
    ("owner", "name", "is_fatal"),
    [
        (Path, "rename", renames_folder),
        (JsonLines, "append", lambda *_, **fields: True),
        (ExportDir, "write", is_last_status),
    ],
    ids=["name", "event", "status"],
)
def test_export_killed_near_its_end_has_one_event(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, is_fatal: Callable[..., bool]
) -> None:
    run_dir, wish = trained.run_dir, ExportWish(dtype="fp16", weights="ema")
    folder, call = run_dir.exports.folder(3, wish), getattr(owner, name)
    shutil.rmtree(folder, ignore_errors=True)
    before = events_of(run_dir, folder)

    def die(*arguments: object, **fields: object) -> object:
        if is_fatal(*arguments, **fields):
            raise KeyboardInterrupt
        return call(*arguments, **fields)

    monkeypatch.setattr(owner, name, die)
    with pytest.raises(KeyboardInterrupt):
        export(run_dir, 3, wish)
    monkeypatch.undo()
    assert folder.exists() == (owner is not Path)
    assert [export(run_dir, 3, wish) for _ in range(2)] == [folder] * 2
    (event,) = events_of(run_dir, folder)[len(before) :]
    status = run_dir.exports.status(3, wish, now=0)
    assert status is not None
    assert (status.state, event) == ("done", event | {"step": 3, "dtype": "fp16", "weights": "ema"})
    assert event["completed"] == status.completed
    assert not event.keys() & {"form", "difference"}


def events_of(run_dir: RunDir, folder: Path) -> list[dict[str, Any]]:
    """Return the events of exports to a folder."""
    lines = (line for attempt in run_dir.attempts() for line in read_lines(attempt.events))
    return [line for line in lines if (line["event"], line.get("folder")) == ("exported", str(folder))]


def test_concurrent_requests_export_once(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, wish, made = trained.run_dir, ExportWish(dtype="bf16", weights="ema"), list[None]()
    both, build = threading.Barrier(2), CAUSAL.build

    def build_and_count(model: ModelSpec) -> Anatomy:
        made.append(None)
        return build(model)

    def request_export() -> Path:
        both.wait()
        return export(run_dir, 3, wish)

    monkeypatch.setattr(CAUSAL, "build", build_and_count)
    with ThreadPoolExecutor(2) as pool:
        folders = {future.result() for future in [pool.submit(request_export), pool.submit(request_export)]}
    assert folders == {run_dir.exports.folder(3, wish)}
    assert (len(made), len(events_of(run_dir, *folders))) == (1, 1)


def test_buffers_saved_by_transformers_are_exported(tmp_path: Path) -> None:
    """Check a factor of each layer: no optimizer has it, and it keeps its dtype."""
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=384)
    run_dir = RunDir(tmp_path / "run")
    model = {"config": small("gemma4_text"), "dtype": "bf16", "master_dtype": "fp32"}
    weights, _ = on_ranks(1, save_a_run_of, tmp_path, run_dir, model)[0]
    factors = [name for name in weights if name.endswith("layer_scalar")]
    assert factors
    folder = export(run_dir, 3, ExportWish(dtype="bf16"))
    loaded, loading_info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading_info
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        for name in factors:
            assert torch.equal(opened.get_tensor(name), weights[name])
            assert opened.get_tensor(name).dtype == weights[name].dtype
    ours = CAUSAL.build(ModelSpec.model_validate(model)).model.to_empty(device="cpu")
    ours.load_state_dict(weights)
    assert loaded.state_dict().keys() == ours.state_dict().keys()


def test_model_without_a_tokenizer_is_exported_without_one(tmp_path: Path) -> None:
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY)).save_pretrained(tmp_path / "model")
    run_dir = RunDir(tmp_path / "run")
    on_ranks(1, save_a_run_of, tmp_path, run_dir, {"config": None, "path": str(tmp_path / "model"), "dtype": "fp32"})
    names = {file.name for file in export(run_dir, 3, FP32).iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_export_without_a_status_for_a_minute_has_ended(tmp_path: Path) -> None:
    exports = RunDir(tmp_path).exports
    assert exports.status(3, FP32, now=0) is None
    exports.write(ExportStatus(step=3, wish=FP32, state="running", time=100.0))
    seen = [exports.status(3, FP32, now=now) for now in (150.0, 200.0)]
    assert [status and status.state for status in seen] == ["running", "failed"]


def test_impossible_export_is_rejected_with_the_reason(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="checkpoint of step 7 not found; available steps: 3"):
        export(trained.run_dir, 7, FP32)
    damaged = RunDir(tmp_path / "damaged")
    shutil.copytree(trained.run_dir.root, damaged.root)
    shutil.rmtree(damaged.exports.root, ignore_errors=True)
    shard = next(damaged.checkpoint(3).glob("__1_*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="the checkpoint of step 3 is damaged"):
        export(damaged, 3, FP32)
    status = damaged.exports.status(3, FP32, now=0)
    assert status is not None
    assert status.state == "failed"
    assert "is damaged" in (status.reason or "")


def gather_both_ways(run_dir: RunDir) -> list[dict[str, Tensor]]:
    model = load_model(run_dir, 3)
    return [gather(model) for gather in WAYS.values()]


def test_full_state_dict_by_dtensor_equals_that_by_dcp(trained: Trained) -> None:
    on_rank_0, elsewhere = on_ranks(2, gather_both_ways, trained.run_dir)
    assert elsewhere == [{}, {}]
    for whole_state in on_rank_0:
        assert whole_state.keys() == trained.weights.keys()
        assert all(torch.equal(value, trained.weights[name]) for name, value in whole_state.items())


def test_file_for_torch_load_is_converted_and_started_from(trained: Trained, tmp_path: Path) -> None:
    """The file of `full` has the weights of the test above."""
    torch.save(trained.weights, tmp_path / "whole.pt")
    arguments = [str(tmp_path / "whole.pt"), str(tmp_path / "out"), "--config", str(trained.run_dir.root)]
    done = CliRunner().invoke(app, ["weights", "convert", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["folder"], found["dtype"], found["tensors"]) == (arguments[1], "float32", len(trained.weights))
    assert found["files"] == ["config.json", "generation_config.json", "model.safetensors"]
    again = CliRunner().invoke(app, ["weights", "convert", *arguments])
    assert again.exit_code == 1
    assert "already exists; choose a new folder, or remove it" in again.stderr
    spec = ModelSpec(path=str(tmp_path / "out"), dtype="fp32")
    model, blueprint = CAUSAL.build(spec).model, CAUSAL.build(spec)
    give_weights(model, blueprint, spec, seed=0, device=torch.device("cpu"))
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, trained.weights[name]), name


def test_checkpoint_of_a_run_is_converted_with_its_config(trained: Trained, tmp_path: Path) -> None:
    tmp_path.joinpath("out").mkdir()
    inputs = find_inputs(trained.run_dir.checkpoint(3))
    assert inputs.run_dir is not None
    done = write_weights(inputs, tmp_path / "out", shard_bytes=10**9)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == trained.weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in trained.weights.items())
    assert done.notes[0].startswith("took model, and left out ")


# The peak memory of a process, which it prints at exit.
MEASURED = """
import atexit, runpy, sys
from pathlib import Path
def print_peak():
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print("peak KiB", peak.split()[1])
atexit.register(print_peak)
runpy.run_module("train_loop.checkpoint.export", run_name="__main__")
"""


def peak_of_export(run_dir: RunDir, *options: str) -> int:
    command = [sys.executable, "-c", MEASURED, str(run_dir.root), "--step", "3", "--dtype", "fp32", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path, peak = done.stdout.splitlines()
    assert Path(path).is_dir()
    return int(peak.rpartition(" ")[2]) * 1024


def save_two_runs(folder: Path, small: RunDir, large: RunDir) -> None:
    save_a_run(folder, small, {})
    save_a_run(folder, large, {"vocab_size": 80_000, "hidden_size": 256})


def test_export_takes_less_memory_than_two_of_the_largest_file(tmp_path: Path) -> None:
    """The limit is relative to the memory of a process that exports almost nothing."""
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    small, large = RunDir(tmp_path / "small"), RunDir(tmp_path / "large")
    on_ranks(1, save_two_runs, tmp_path, small, large)
    size = 80_000 * 256 * 4
    more = peak_of_export(large, "--shard-bytes", str(size)) - peak_of_export(small)
    files = [file.stat().st_size for file in large.exports.folder(3, FP32).glob("*.safetensors")]
    assert len(files) == 3
    assert max(files) >= size
    assert more < 2 * max(files)


def write_model_that_ends(folder: Path, token: int) -> None:
    """Write a model that predicts one token everywhere, and whose configs name another as EOS."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY, eos_token_id=0, bos_token_id=0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_("norm" in name or "embed" in name)
        model.lm_head.weight[token] = 1
    model.save_pretrained(folder)


def test_generation_by_an_export_ends_at_the_tokenizers_eos(tmp_path: Path) -> None:
    model_home, home, run_dir = tmp_path / "model", tmp_path / "tokenizer", RunDir(tmp_path / "run")
    write_tokenizer(home)
    own = AutoTokenizer.from_pretrained(home)
    write_model_that_ends(model_home, own.eos_token_id)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (model_home / name).write_text("{}")
    for name in ("tokenizer_old/vocab.txt", "additional_chat_templates/tool_use.jinja", "tokenizer_code.py"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("content")
    write_tokens(tmp_path / "d.parquet", rows=8, length=32, vocab=TINY["vocab_size"])
    on_ranks(1, save_a_run_of, tmp_path, run_dir, {"config": None, "path": str(model_home), "dtype": "fp32"})
    pointer = json.loads(run_dir.data.read_bytes())
    run_dir.data.write_text(json.dumps(pointer | {"tokenizer": str(home)}))
    exported = export(run_dir, 3, FP32)
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    assert tokenizer("as it was")["input_ids"] == own("as it was")["input_ids"]
    assert model.config.eos_token_id == own.eos_token_id
    assert model.generation_config.eos_token_id == [own.eos_token_id, 0]
    prompt = tokenizer("as it was", return_tensors="pt")["input_ids"]
    assert model.generate(prompt, max_new_tokens=9)[0, prompt.shape[1] :].tolist() == [own.eos_token_id]
    found = {str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file()}
    assert found >= {"additional_chat_templates/tool_use.jinja", "preprocessor_config.json", "processor_config.json"}
    assert found >= {"video_preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert not {"tokenizer_code.py", "tokenizer_old/vocab.txt"} & found
