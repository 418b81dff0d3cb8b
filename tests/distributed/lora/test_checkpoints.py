"""Checkpoints of adapters: what they contain, what they refer to, and runs that continue from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.layouts import saved_in_each_layout, values_of
from tests.support.builders.folders import write_model
from tests.support.builders.small_runs import LENGTH, events, lines, numbers, run
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.adapters import frozen_weights
from tests.support.ranks.gradients import forget_meshes
from tests.support.ranks.torchrun import write_tokens
from train_loop import train
from train_loop.checkpoint.digest import digest_step
from train_loop.loop.build import Run, build_run
from train_loop.run_dir import Parent, RunDir

CallRanks = Callable[..., Any]
LORA = {"r": 2, "dropout": 0.1}
ANY_SIZE = {"reproducible": "any_size", "reduction_tree": {"max_shards": 4, "max_replicas": 1}}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    write_tokens(folder / "d.parquet", rows=40, length=LENGTH, vocab=300)
    write_model(folder / "base", vocab_size=8192)
    return folder


def train_adapters(
    home: Path,
    name: str,
    training: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = LORA,
) -> dict[str, torch.Tensor]:
    """Train on a rank, and return the frozen weights after it."""
    kept, build = list[Run](), build_run

    def keep(*arguments: Any) -> Run:
        kept.append(build(*arguments))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build_run", keep)
        path = None if config is not None else str(home / "base")
        run(home / "d.parquet", home / name, model={"path": path, "config": config, "lora": lora}, **training or {})
    return frozen_weights(kept[0].state.model)


def test_resized_run_equals_the_undisturbed_one_and_leaves_frozen_weights(call_ranks: CallRanks, home: Path) -> None:
    source = load_file(home / "base" / "model.safetensors")
    call_ranks(2, train_adapters, home, "whole", ANY_SIZE)
    for world, last in ((2, {"max_steps": 4}), (4, {"max_steps": 5}), (1, {})):
        frozen = call_ranks(world, train_adapters, home, "parts", ANY_SIZE | last)
        assert frozen.keys() == source.keys()
        assert [name for name, value in source.items() if not torch.equal(frozen[name], value)] == []
    found = [digest_step(RunDir(home / name), 6) for name in ("whole", "parts")]
    assert found[0] is not None
    assert found[0] == found[1]
    assert any("lora_A" in name and "exp_avg" in name for name in found[0].tensors)
    whole, parts = ([numbers(line) for line in lines(home / name)] for name in ("whole", "parts"))
    assert whole == parts
    assert whole[0] != whole[-1]


def test_checkpoint_has_only_what_is_trained(call_ranks: CallRanks, home: Path) -> None:
    call_ranks(2, train_adapters, home, "small", {"ema_decay": 0.9}, None, {"r": 1, "target_modules": ["q_proj"]})
    call_ranks(2, train_adapters, home, "full", {"ema_decay": 0.9}, None, None)
    small, full = (RunDir(home / name) for name in ("small", "full"))
    manifest = small.manifests()[6]
    assert manifest.bytes < full.manifests()[6].bytes / 10
    found = digest_step(small, 6)
    assert found is not None
    names = {name for name in found.tensors if name.startswith("model.")}
    assert names == {
        f"model.model.layers.{layer}.self_attn.q_proj.lora_{part}.default.weight" for layer in (0, 1) for part in "AB"
    }
    assert {name.removeprefix("ema.") for name in found.tensors if name.startswith("ema.")} == {
        name.removeprefix("model.") for name in names
    }
    (built,) = events(home / "small", "model_built")
    assert built["trained_parameters"] == 2 * (32 + 32)
    (whole,) = events(home / "full", "model_built")
    assert whole["trained_parameters"] == whole["parameters"] == built["parameters"] - built["trained_parameters"]
    assert manifest.base is not None
    assert manifest.base.path == str(home / "base")
    assert "peft" in manifest.versions
    assert full.manifests()[6].base is None


def test_clone_continues_the_adapters_and_changed_base_is_refused(call_ranks: CallRanks, home: Path) -> None:
    call_ranks(2, train_adapters, home, "parent")
    manifest = RunDir(home / "parent").manifests()[3]
    for name in ("heir", "stranger"):
        RunDir(home / name).write_parent(
            Parent(
                job="job-parent",
                run_dir=str(home / "parent"),
                manifest=manifest,
                same_order=True,
                same_optimizer=True,
            )
        )
    call_ranks(2, train_adapters, home, "heir")
    assert [numbers(line) for line in lines(home / "heir")] == [numbers(line) for line in lines(home / "parent")][3:]
    file = home / "base" / "model.safetensors"
    before, weights = file.read_bytes(), load_file(file)
    weights["model.norm.weight"][0] += 1
    save_file(weights, file, metadata={"format": "pt"})
    try:
        for name in ("parent", "stranger"):
            with pytest.raises(
                AssertionError,
                match=rf"ModelError: the checkpoint of step \d has adapters for the weights of {home}/base with the "
                rf"SHA-256 [0-9a-f]{{12}}, and {home}/base now has [0-9a-f]{{12}}; restore its files, or start a new",
            ):
                call_ranks(2, train_adapters, home, name, {"max_steps": 8})
    finally:
        file.write_bytes(before)
    call_ranks(2, train_adapters, home, "parent", {"max_steps": 8})
    assert len(lines(home / "parent")) == 8


SHARED = {"fsdp 4": {}, "fsdp 2 x tp 2": {"tp_size": 2}}
PAIRS = [("fsdp 4", "fsdp 2 x tp 2"), ("fsdp 2 x tp 2", "fsdp 4")]
"""Layouts in which a checkpoint is saved and loaded."""


def saved_adapters(home: Path) -> dict[str, Any]:
    """Save adapters, optimizer states and averages in each layout, and read them in another."""
    forget_meshes()
    model = {"config": TINY | {"tie_word_embeddings": False}, "lora": {"r": 3, "modules_to_save": ["lm_head"]}}
    states = {
        name: values_of(spec(model=model, strategy=strategy, training={"ema_decay": 0.5}, scaling={"num_workers": 4}))
        for name, strategy in SHARED.items()
    }
    return saved_in_each_layout(home, states, PAIRS)


def test_checkpoint_of_ranks_that_share_layers_loads_in_any_layout(call_ranks: CallRanks, tmp_path: Path) -> None:
    found = call_ranks(4, saved_adapters, tmp_path)
    assert found["faults"] == {pair: [] for pair in PAIRS}
    assert len(set(found["digests"].values())) == 1
    # A and B of seven targets in two layers, and the head: weights, averages, three states, and means.
    assert found["tensors"] > 29 * 4


def test_ranks_that_share_layers_train_as_one(call_ranks: CallRanks, home: Path) -> None:
    source, lora = load_file(home / "base" / "model.safetensors"), {"r": 2}
    tp: dict[str, Any] = {"strategy": {"tp_size": 2}, "max_grad_norm": 0.1}
    call_ranks(1, train_adapters, home, "one", {"max_grad_norm": 0.1}, None, lora)
    call_ranks(4, train_adapters, home, "shared", tp, None, lora)
    for last in ({"max_steps": 4}, {}):
        frozen = call_ranks(4, train_adapters, home, "stopped", tp | last, None, lora)
        assert [name for name, value in source.items() if not torch.equal(frozen[name], value)] == []
    for alone, together in zip(lines(home / "one"), lines(home / "shared"), strict=True):
        assert numbers(together) == pytest.approx(numbers(alone), rel=1e-5)
        assert alone["grad_norm"] > 0.1, "clipping has an effect"
    assert digest_step(RunDir(home / "shared"), 6) == digest_step(RunDir(home / "stopped"), 6)


def test_ranks_that_share_experts_train_as_one(call_ranks: CallRanks, home: Path) -> None:
    mixture = TINY | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    lora, shared = {"r": 2, "target_modules": ["q_proj", "o_proj"]}, {"strategy": {"ep_size": 2}}
    source = call_ranks(1, train_adapters, home, "mixture", None, mixture, lora)
    for world, last in ((4, {"max_steps": 4}), (2, {})):
        frozen = call_ranks(world, train_adapters, home, "experts", shared | last, mixture, lora)
        assert frozen.keys() == source.keys()
        assert [name for name, value in source.items() if not torch.equal(frozen[name], value)] == []
    for alone, together in zip(lines(home / "mixture"), lines(home / "experts"), strict=True):
        assert numbers(together) == pytest.approx(numbers(alone), rel=1e-5)


RANDOM = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16}
RANDOM |= {"num_hidden_layers": 1, "num_attention_heads": 2}


def test_random_base_is_drawn_again_on_resume_and_another_seed_is_refused(call_ranks: CallRanks, home: Path) -> None:
    first = call_ranks(2, train_adapters, home, "random", {"max_steps": 4}, RANDOM)
    again = call_ranks(1, train_adapters, home, "random", {"max_steps": 5}, RANDOM)
    assert [name for name, value in first.items() if not torch.equal(again[name], value)] == []
    with pytest.raises(AssertionError, match=r"for random weights with the SHA-256 .* its training\.seed"):
        call_ranks(1, train_adapters, home, "random", {"max_steps": 6, "seed": 1}, RANDOM)


def test_checkpoint_of_fewer_trained_modules_is_refused_on_resume(call_ranks: CallRanks, home: Path) -> None:
    """As one that an earlier version wrote, for which a name chose fewer modules."""
    call_ranks(1, train_adapters, home, "fewer", {"max_steps": 4}, RANDOM, {"r": 2})
    with pytest.raises(
        AssertionError,
        match=r"ModelError: the checkpoint of step 4 has adapters, and none of model\.layers\.0\.input_layernorm"
        r"\.weight, model\.layers\.0\.post_attention_layernorm\.weight, model\.norm\.weight, which this run trains: .* "
        r"continue and export it with that spec and version, or start a new run",
    ):
        call_ranks(1, train_adapters, home, "fewer", {"max_steps": 5}, RANDOM, {"r": 2, "modules_to_save": ["norm"]})
