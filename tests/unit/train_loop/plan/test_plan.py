"""The plan: degrees → mesh, batches → steps, parameters → memory, workers → resources."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.folders import write_model
from tests.support.builders.specs import TINY, raw_spec, spec
from train_loop.model.folder import model_shape
from train_loop.plan import (
    Origin,
    Plan,
    SampleCount,
    check_schedule,
    data_starves,
    plan_batch,
    plan_end,
    plan_job,
    plan_mesh,
    plan_samples,
    plan_steps,
    read_shape,
    too_big,
)
from train_loop.plan.memory.forward import WITH_GRADIENTS
from train_loop.spec import SpecError, TrainingSpec, parse


@pytest.mark.parametrize(
    ("world", "fsdp_size", "ulysses_size", "shape", "names", "dp"),
    [
        (8, 4, 2, (2, 4), ("ddp", "fsdp"), 4),
        (8, 0, 1, (8,), ("fsdp",), 8),
        (8, 1, 2, (8,), ("fsdp",), 4),
        (8, 8, 8, (8,), ("fsdp",), 1),
        (4, 16, 2, (4,), ("fsdp",), 2),
        (4, 2, 2, (2, 2), ("ddp", "fsdp"), 2),
        (1, 0, 1, (1,), ("fsdp",), 1),
    ],
)
def test_mesh_follows_the_rule(
    world: int, fsdp_size: int, ulysses_size: int, shape: tuple[int, ...], names: tuple[str, ...], dp: int
) -> None:
    mesh = plan_mesh(world=world, fsdp_size=fsdp_size, ulysses_size=ulysses_size)
    assert (mesh.shape, mesh.names, mesh.dp) == (shape, names, dp)


@given(world=st.integers(1, 64), fsdp_size=st.integers(-1, 70), ulysses_size=st.integers(1, 16))
def test_mesh_holds_every_rank_once_or_is_rejected(world: int, fsdp_size: int, ulysses_size: int) -> None:
    group = world if fsdp_size <= 1 or fsdp_size >= world else fsdp_size
    if world % group or group % ulysses_size:
        with pytest.raises(ValueError, match="choose"):
            plan_mesh(world=world, fsdp_size=fsdp_size, ulysses_size=ulysses_size)
        return
    mesh = plan_mesh(world=world, fsdp_size=fsdp_size, ulysses_size=ulysses_size)
    assert mesh.dp * mesh.sp == mesh.ddp * mesh.fsdp == world == mesh.world
    places = {(mesh.data_rank(rank), mesh.sequence_rank(rank)) for rank in range(world)}
    assert places == {(d, s) for d in range(mesh.dp) for s in range(mesh.sp)}
    for grid in (mesh.parameters, mesh.samples):
        at = {tuple(axis.place(rank) for axis in grid) for rank in range(world)}
        assert at == set(product(*(range(axis.size) for axis in grid)))
    for axis in (*mesh.parameters, *mesh.samples):
        groups = axis.groups(world)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {tuple(map(axis.place, group)) for group in groups} == {tuple(range(axis.size))}


def a_plan(**parts: dict[str, Any]) -> Plan:
    """Return the plan of a spec that saves after each step, unless `parts` say otherwise."""
    job = parse(raw_spec(**{"checkpoint": {"every_steps": 1}} | parts))
    return plan_job(job, model_shape(job.model))


def problems(**parts: dict[str, Any]) -> dict[str, str]:
    """Return pointer and message of each problem of the plan."""
    with pytest.raises(SpecError) as caught:
        a_plan(**parts)
    return {problem.pointer: problem.message for problem in caught.value.problems}


def test_fsdp_size_must_divide_the_world() -> None:
    assert problems(strategy={"fsdp_size": 3}, scaling={"num_workers": 4}) == {
        "/strategy/fsdp_size": "fsdp_size=3 does not divide the 4 workers; choose 1, 2 or 4, "
        "or 0 to shard over all of them"
    }


def test_ulysses_size_must_divide_an_fsdp_group() -> None:
    assert problems(strategy={"fsdp_size": 2, "ulysses_size": 4}, scaling={"num_workers": 4}) == {
        "/strategy/ulysses_size": "ulysses_size=4 does not divide the 2 ranks of an fsdp group; choose 1 or 2"
    }


def test_ulysses_size_must_divide_the_heads() -> None:
    assert problems(strategy={"ulysses_size": 8}, scaling={"num_workers": 8}) == {
        "/strategy/ulysses_size": "ulysses_size=8 does not divide num_attention_heads=4; choose 1, 2 or 4"
    }


def test_ulysses_size_must_suit_the_kv_heads() -> None:
    config = TINY | {"num_attention_heads": 12, "num_key_value_heads": 6}
    assert problems(model={"config": config}, strategy={"ulysses_size": 4}, scaling={"num_workers": 4}) == {
        "/strategy/ulysses_size": "ulysses_size=4 neither divides nor is a multiple of num_key_value_heads=6; "
        "choose 1, 2, 3, 6 or 12"
    }


def test_ulysses_size_must_divide_the_sequence() -> None:
    assert problems(data={"sequence_length": 33}, strategy={"ulysses_size": 2}, scaling={"num_workers": 2}) == {
        "/strategy/ulysses_size": "ulysses_size=2 does not divide sequence_length=33; "
        "choose a multiple of 2, for example 34"
    }


def test_global_batch_size_must_be_a_multiple_of_the_rank_batches() -> None:
    assert problems(training={"global_batch_size": 6}, scaling={"num_workers": 4}) == {
        "/training/global_batch_size": "global_batch_size=6 is not a multiple of per_device_train_batch_size=1 x "
        "4 data-parallel ranks; choose 4 or 8"
    }


def test_sizes_of_an_unknown_family_are_required() -> None:
    with pytest.raises(ValueError, match="add vocab_size, hidden_size, num_hidden_layers, num_attention_heads"):
        read_shape({"model_type": "novel"})
    with pytest.raises(ValueError, match="hidden_size='x' is not a positive whole number; correct it"):
        read_shape(TINY | {"hidden_size": "x"})


def test_old_size_names_of_gpt2_are_read() -> None:
    shape = read_shape(
        {"model_type": "gpt2", "vocab_size": 9, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_inner": None}
    )
    assert (shape.hidden, shape.intermediate, shape.layers, shape.heads, shape.kv_heads) == (32, 128, 2, 4, 4)
    assert not shape.known


def test_plan_of_a_folder_equals_that_of_its_config(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    there = a_plan(model={"path": tmp_path.as_uri(), "config": None})
    assert there == a_plan(model={"config": TINY | {"num_hidden_layers": 1}})


def test_global_batch_is_the_same_at_every_world_size() -> None:
    training = spec(training={"global_batch_size": 16, "per_device_train_batch_size": 2}).training
    plans = [plan_batch(training, dp=dp) for dp in (1, 2, 4, 8)]
    assert {plan.global_batch for plan in plans} == {16}
    assert [plan.accumulation for plan in plans] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("epochs", "steps", "samples"), [(1.0, 13, 100), (2.0, 25, 200), (0.5, 7, 50), (None, 13, 100)]
)
def test_epochs_train_every_sample_with_a_short_last_step(epochs: float | None, steps: int, samples: int) -> None:
    training = spec(training={"max_steps": None, "num_train_epochs": epochs}).training
    assert plan_steps(training, samples=100, tokens=3200, global_batch=8) == steps
    assert plan_samples(training, samples=100, global_batch=8) == samples


@given(
    st.integers(1, 60), st.floats(0.1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(0, 30), st.integers(0, 9)
)
def test_earlier_of_steps_and_epochs_ends_a_run(
    steps: int, epochs: float, samples: int, batch: int, consumed: int, done: int
) -> None:
    both, by_steps, by_epochs = (
        TrainingSpec(learning_rate=1.0, max_steps=max_steps, num_train_epochs=num_train_epochs)
        for max_steps, num_train_epochs in ((steps, epochs), (steps, None), (None, epochs))
    )
    counts: dict[str, Any] = {"samples": samples, "global_batch": batch, "origin": Origin(done, 0, consumed)}
    last = [plan_steps(one, tokens=1, **counts) for one in (by_steps, by_epochs)]
    assert plan_steps(both, tokens=1, **counts) == min(last)
    assert plan_samples(both, **counts) == min(plan_samples(one, **counts) for one in (by_steps, by_epochs))
    assert plan_end(both, **counts) == ("max_steps" if last[0] <= last[1] else "num_train_epochs")
    assert (plan_end(by_steps, **counts), plan_end(by_epochs, **counts)) == ("max_steps", "num_train_epochs")


@pytest.mark.parametrize(
    ("ends", "count", "expected"),
    [
        ({"max_steps": 5}, SampleCount(100, exact=True), (5, "max_steps")),
        ({"max_steps": 5, "num_train_epochs": 1}, SampleCount(100, exact=True), (5, "max_steps")),
        ({"max_steps": 50, "num_train_epochs": 1}, SampleCount(100, exact=True), (13, "num_train_epochs")),
        ({"max_steps": 50, "num_train_epochs": 1}, SampleCount(100, exact=False), (None, "num_train_epochs")),
        ({"max_steps": 5, "num_train_epochs": 1}, SampleCount(100, exact=False), (None, None)),
        ({"max_steps": 5, "num_train_epochs": 1}, None, (None, None)),
        ({"num_train_epochs": 1}, None, (None, "num_train_epochs")),
        ({"max_steps": 5}, None, (5, "max_steps")),
        ({"max_tokens": 5}, SampleCount(100, exact=True), (None, "max_tokens")),
    ],
)
def test_end_of_a_run_is_told_as_far_as_it_is_known(
    ends: dict[str, Any], count: SampleCount | None, expected: tuple[int | None, str | None]
) -> None:
    training = spec(training={"max_steps": None} | ends).training
    assert check_schedule(training, count, global_batch=8) == (expected, [])


def test_warmup_as_a_fraction_of_a_short_run_is_rejected() -> None:
    training = spec(training={"max_steps": None, "warmup_steps": 0.9}).training
    assert check_schedule(training, SampleCount(160, exact=True), global_batch=8) == ((20, "num_train_epochs"), [])
    _, (problem,) = check_schedule(training, SampleCount(40, exact=True), global_batch=8)
    assert problem.pointer == "/training/warmup_steps"
    assert problem.message.startswith("warmup_steps=5 is not less than the 5 steps of the run")


@pytest.mark.parametrize(("max_tokens", "steps"), [(1, 1), (240, 1), (241, 2), (100_000, 417)])
def test_token_budget_becomes_steps_by_mean_sample_length(max_tokens: int, steps: int) -> None:
    training = spec(training={"max_steps": None, "max_tokens": max_tokens}).training
    # 100 samples of 30 tokens, 8 in a step.
    assert plan_steps(training, samples=100, tokens=3000, global_batch=8) == steps
    assert plan_samples(training, samples=100, global_batch=8) >= max_tokens, "expected one token per sample at least"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "sizes",
    [TINY, TINY | {"tie_word_embeddings": True, "num_key_value_heads": 1}, {"num_hidden_layers": 2}],
    ids=["tiny", "tied", "the family's defaults"],
)
def test_parameter_count_equals_that_of_transformers(model_type: str, sizes: dict[str, Any]) -> None:
    config = sizes | {"model_type": model_type}
    hf_config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    assert read_shape(config).parameters == sum(p.numel() for p in model.parameters())


def test_memory_is_listed_by_term_and_shrinks_with_the_mesh() -> None:
    one = a_plan()
    four = a_plan(strategy={"ulysses_size": 2}, scaling={"num_workers": 4})
    terms = {term.name: term.bytes for term in one.memory}
    parameters = one.shape.parameters
    assert (terms["parameters"], terms["gradients"], terms["optimizer"]) == (
        4 * parameters,
        4 * parameters,
        8 * parameters,
    )
    assert one.memory_bytes == sum(terms.values())
    shrunk = {term.name: term.bytes for term in four.memory}
    assert shrunk["optimizer"] == 8 * -(-parameters // 4)
    assert shrunk["logits"] * 2 == terms["logits"]


def test_no_term_is_negative() -> None:
    # Inside the layers, the sharded gradients of a large vocabulary do not exist yet.
    large = {"config": TINY | {"vocab_size": 100_000, "tie_word_embeddings": True}, "dtype": "bf16"}
    plan = a_plan(model=large, training={"chunked_loss": True}, data={"sequence_length": 4096}, scaling=ON_GPU)
    assert min(term.bytes for term in plan.memory) == 0


ON_GPU = {"resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}


def test_offloaded_terms_count_as_host_memory() -> None:
    layers_only = {"wrap_policy": {"wrap_embeddings": False, "wrap_lm_output": False}}
    offload: dict[str, Any] = {
        "model": {"gradient_checkpointing": "offload"},
        "strategy": {"offload_policy": True, **layers_only},
    }
    kept = a_plan(model={"gradient_checkpointing": "full"}, strategy=layers_only, scaling=ON_GPU)
    moved, on_cpu = a_plan(**offload, scaling=ON_GPU), a_plan(**offload)
    at_home = {"parameters", "gradients", "optimizer", "ema", "checkpoint_staging", "offloaded_activations"}
    assert {term.name for term in moved.memory if term.place == "host"} == at_home
    # With a GPU, the host also holds the buffer from which a checkpoint is written.
    staged = sum(term.bytes for term in kept.memory if term.name in ("parameters", "optimizer", "ema"))
    assert kept.host_memory_bytes == staged < moved.host_memory_bytes
    # Shards are made where the model computes, before they move.
    before, after = (
        sum(term.bytes for term in plan.memory if term.name != "gathered_parameters") for plan in (kept, moved)
    )
    assert after == before
    # Without a GPU, there is only host memory.
    assert (on_cpu.memory_bytes, on_cpu.host_memory_bytes) == (moved.memory_bytes + moved.host_memory_bytes, 0)
    without_copy = a_plan(strategy={"async_save_ckpt": "sync"})
    assert without_copy.memory_bytes == a_plan().memory_bytes - staged


@pytest.mark.parametrize("mode", ["none", "full"])
def test_one_mlp_tile_is_counted(mode: str) -> None:
    whole, tiled = (
        next(term.bytes for term in plan.memory if term.name == "activations")
        for plan in (
            a_plan(
                model={"gradient_checkpointing": mode, "config": TINY | {"vocab_size": 8}},
                strategy={"apply_tiled_mlp": tiles, "tiled_num_shards": 4},
            )
            for tiles in (False, True)
        )
    )
    wide = 4 * 32 * 4 * TINY["intermediate_size"]
    layers, factor = (TINY["num_hidden_layers"], 1) if mode == "none" else (1, WITH_GRADIENTS)
    assert whole - tiled == pytest.approx(factor * (wide * layers - wide // 4), abs=1)


def activations(layers: int, how: Any, **config: int) -> Any:
    """Return the term of activations of a model with some layers."""
    plan = a_plan(model={"gradient_checkpointing": how, "config": TINY | {"num_hidden_layers": layers, **config}})
    return next(term for term in plan.memory if term.name == "activations")


def test_layers_count_what_transformers_keeps() -> None:
    tokens, heads = 32, (TINY["num_attention_heads"] + TINY["num_key_value_heads"]) * TINY["head_dim"]
    norms, mlp = 2 * (4 + 2 * 4) * TINY["hidden_size"], 4 * 4 * TINY["intermediate_size"]
    # Keys and queries are normed, too.
    assert activations(1, "none").bytes == tokens * (norms + (2 * 4 + 8) * heads + mlp)
    compiled = a_plan(model={"gradient_checkpointing": "none", "compile": True})
    (term,) = (one for one in compiled.memory if one.name == "activations")
    assert term.bytes == 2 * tokens * 4 * (4 * TINY["hidden_size"] + 2 * heads + 3 * TINY["intermediate_size"])


def test_recomputation_of_some_layers_counts_both_kinds() -> None:
    layer, inputs = activations(1, "none").bytes, 4 * 32 * TINY["hidden_size"]
    # The logits are larger than a recomputed layer.
    assert activations(6, "full").bytes == activations(6, {"every": 1}).bytes == 6 * inputs
    assert activations(6, {"every": 2}).bytes == 3 * layer + 3 * inputs
    assert activations(7, {"every": 3}).bytes == 4 * layer + 3 * inputs
    assert activations(6, {"every": 9}).bytes == 5 * layer + inputs
    assert activations(6, {"every": 2}).formula.startswith("0.5 x (24H + ")


def test_layer_that_is_recomputed_counts_beyond_the_logits() -> None:
    few = {"vocab_size": 8}
    layer, inputs, logits = activations(1, "none", **few).bytes, 4 * 32 * TINY["hidden_size"], 12 * 32 * 8
    assert activations(6, "full", **few).bytes == round(6 * inputs + WITH_GRADIENTS * layer - logits)
    # Without the last layer, which is plain, backward has freed one before.
    assert activations(6, {"every": 2}, **few).bytes == 3 * layer + 3 * inputs
    last = WITH_GRADIENTS * layer - logits
    assert activations(7, {"every": 3}, **few).bytes == round(4 * layer + 3 * inputs + last)


def test_selective_counts_its_results() -> None:
    tokens, layer, logits = 32, activations(1, "none", vocab_size=8).bytes, 12 * 32 * 8
    heads, kv = TINY["num_attention_heads"] * TINY["head_dim"], TINY["num_key_value_heads"] * TINY["head_dim"]
    kept = 4 * tokens * (2 * heads + kv + TINY["intermediate_size"] + TINY["hidden_size"])
    found = [activations(6, how, vocab_size=8).bytes for how in ("full", "selective", "none")]
    # The current layer contains what it has kept before.
    last = WITH_GRADIENTS * layer - kept - logits
    assert found[1] == round(6 * (kept + 4 * tokens * TINY["hidden_size"]) + last)
    assert found == sorted(found)


def test_attention_without_a_mask_counts_no_mask() -> None:
    def mask(**model: str) -> int:
        plan = a_plan(model={"dtype": "bf16"} | model)
        return next(term.bytes for term in plan.memory if term.name == "attention_mask")

    layers = TINY["num_hidden_layers"]
    # Each layer that is not computed again keeps a copy in bf16.
    assert mask() == (1 + 2) * 32**2
    assert mask(gradient_checkpointing="none") == (1 + 2 * layers) * 32**2
    assert mask(attn_implementation="flash_attention_2") == mask(attn_implementation="flex_attention") == 0


def test_workers_that_fit_no_node_are_reported_with_numbers() -> None:
    scaling = spec(scaling={"num_workers": 8, "resources_per_worker": {"CPU": 1.0, "GPU": 1.0}}).scaling
    assert too_big(scaling, {"CPU": 16.0, "GPU": 8.0}) is None
    assert too_big(scaling, {"CPU": 16.0}) == (
        "8 workers need 8 GPU (the cluster has 0); add nodes, or cancel and submit fewer or smaller workers"
    )


@pytest.mark.parametrize(("cpus", "starves"), [(3.0, False), (4.0, True), (4.5, True), (5.0, False)])
def test_workers_must_leave_a_cpu_for_ray_data(cpus: float, starves: bool) -> None:
    scaling = spec(scaling={"num_workers": 4, "resources_per_worker": {"CPU": 1.0}}).scaling
    problem = data_starves(scaling, {"CPU": cpus})
    assert (problem is not None) is starves
    if problem is not None:
        assert problem.pointer == "/scaling/resources_per_worker"
        assert "leave less than the 1 that Ray Data needs; choose at most" in problem.message


def test_ray_data_is_not_starved_without_a_known_cluster_or_cpu_request() -> None:
    gpu_only = spec(scaling={"num_workers": 2, "resources_per_worker": {"GPU": 1.0}}).scaling
    assert data_starves(gpu_only, None) is None
    assert data_starves(gpu_only, {"CPU": 4.0, "GPU": 2.0}) is None
    problem = data_starves(gpu_only, {"GPU": 2.0})
    assert problem is not None
    assert "2 workers x 0 CPU take 0 of the cluster's 0 CPUs" in problem.message


@pytest.mark.parametrize(
    ("checkpoint", "last", "between"),
    [
        ({"every_steps": 10}, 20, True),
        ({"every_steps": 20}, 20, False),
        ({"every_steps": None}, 20, False),
        ({"every_steps": None, "every_seconds": 60}, 20, True),
    ],
    ids=str,
)
def test_save_after_the_last_step_takes_the_place_of_gradients(
    checkpoint: dict[str, Any], last: int, between: bool
) -> None:
    for scaling, sums in (({"num_workers": 1}, True), (ON_GPU, False)):
        plan = a_plan(checkpoint=checkpoint, training={"max_steps": last, "optimizer": "adamw"}, scaling=scaling)
        terms = {term.name: term.bytes for term in plan.memory}
        state, step = terms["parameters"] + terms["optimizer"], terms["gathered_parameters"] + terms["gradients"]
        # On a GPU's host nothing else is freed.
        assert terms["checkpoint_staging"] == (state if between or not sums else max(state - step, 0))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_bf16_master_halves_weights_gradients_and_moments(optimizer: str) -> None:
    whole, half = (
        {term.name: term.bytes for term in a_plan(model={"master_dtype": m}, training={"optimizer": optimizer}).memory}
        for m in ("fp32", "bf16")
    )
    halved = {"parameters", "gradients", "optimizer", "checkpoint_staging"}
    assert all(half[name] * 2 == whole[name] for name in halved)
    # Gathered parameters use the room of gradients that do not exist yet.
    others = whole.keys() - halved - {"gathered_parameters"}
    assert others <= {n: b for n, b in half.items() if b == whole[n]}.keys()


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [("adamw", 8), ("adamw_8bit", 2 + 1 / 32), ("sgd", 4), ("muon", 4 + 4 * 24608 / 40128)],
)
def test_memory_counts_optimizer_state_and_weight_average(optimizer: str, per_parameter: float) -> None:
    job = spec(training={"optimizer": optimizer, "ema_decay": 0.99})
    plan = plan_job(job, model_shape(job.model))
    terms = {term.name: term.bytes for term in plan.memory}
    assert terms["ema"] == 4 * plan.shape.parameters
    assert terms["optimizer"] == pytest.approx(per_parameter * plan.shape.parameters, rel=0.01)
