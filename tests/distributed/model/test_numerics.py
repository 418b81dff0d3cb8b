"""The loop, compared with a plain float64 computation, and individual numerical rules."""

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.builders.reference import reference
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, build, divisor, my_share, one_step, random_rows, weigh
from tests.support.ranks.ranks import on_ranks, ranks_that_stay
from train_loop.conformance.measure import accumulate_plainly
from train_loop.data.dataset import Rows
from train_loop.loop.batch import micro_batches
from train_loop.spec import JobSpec

VOCAB = TINY["vocab_size"]
MORE = bool(os.environ.get("MORE"))
DRAWING_SECONDS = 60 if MORE else 5
Result = tuple[float, Gradients]


@pytest.fixture(scope="module")
def four() -> Iterator[Callable[..., Any]]:
    with ranks_that_stay(4) as call:
        yield call


def a_job(*, world: int = 4, per_device: int = 1, **parts: dict[str, Any]) -> JobSpec:
    base: dict[str, dict[str, Any]] = {
        "model": {"config": TINY},
        "training": {"per_device_train_batch_size": per_device},
        "scaling": {"num_workers": world},
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base.keys() | parts.keys()})


def assert_equal(found: Result, expected: Result, *, tolerance: float) -> None:
    """Check loss and gradients by relative error; compare an fp32 rounding of zero with the other gradients."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    largest = max(value.norm() for value in expected[1].values())
    for name, value in expected[1].items():
        assert (found[1][name] - value).norm() <= tolerance * value.norm() + 1e-7 * largest, name


@st.composite
def shapes(draw: st.DrawFn) -> tuple[JobSpec, Rows]:
    """Draw a mesh of four ranks, a small Qwen3 that fits it, and samples."""
    sp = draw(st.sampled_from([1, 2, 4]))
    fsdp = draw(st.sampled_from([size for size in (2, 4) if size % sp == 0]))
    heads = sp * draw(st.sampled_from([1, 2, 3]))
    kv = draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0 and (k % sp == 0 or sp % k == 0)]))
    config = TINY | {
        "hidden_size": draw(st.sampled_from([16, 24, 40])),
        "intermediate_size": draw(st.sampled_from([20, 48])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([4, 8])),
        "tie_word_embeddings": draw(st.booleans()),
    }
    per_device, accumulation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    length, count = sp * draw(st.integers(2, 9)), per_device * accumulation * (4 // sp)
    job = a_job(
        per_device=per_device,
        model={"config": config, "gradient_checkpointing": draw(st.sampled_from(["none", "full", "offload"]))},
        data={"sequence_length": length},
        training={"chunked_loss": draw(st.booleans())},
        strategy={
            "fsdp_size": fsdp,
            "ulysses_size": sp,
            "apply_tiled_mlp": draw(st.booleans()),
            "tiled_num_shards": draw(st.integers(1, 9)),
        },
    )
    rows = random_rows(count, length, vocab=VOCAB, packed=draw(st.booleans()), seed=draw(st.integers(0, 99)))
    return job, weigh(rows) if draw(st.booleans()) else rows


def test_any_shape_at_any_mesh_equals_float64(four: Callable[..., Any]) -> None:
    end, failed = time.monotonic() + DRAWING_SECONDS, False

    @given(drawn=shapes())
    @settings(max_examples=200, suppress_health_check=list(HealthCheck), deadline=None)
    def equals(drawn: tuple[JobSpec, Rows]) -> None:
        nonlocal failed
        # Hypothesis has no time limit: a slow example does not fail. A failure is shrunk.
        if time.monotonic() > end and not failed:
            return
        job, rows = drawn
        try:
            assert_equal(four(one_step, job, rows), reference(job, rows), tolerance=1e-5)
        except AssertionError:
            failed = True
            raise

    equals()


def test_four_micro_batches_equal_one_large_batch(four: Callable[..., Any]) -> None:
    rows = random_rows(16, 32, vocab=VOCAB, packed=True)
    strategies: list[dict[str, Any]] = [{}, {"fsdp_size": 2}, {"sharding_strategy": "NO_SHARD"}]
    for strategy in strategies:
        found = four(one_step, a_job(per_device=1, strategy=strategy), rows)
        assert_equal(found, four(one_step, a_job(per_device=4, strategy=strategy), rows), tolerance=1e-6)


def count_all_reduces(job: JobSpec, rows: Rows) -> int:
    """Return the number of collectives over replicas in one accumulated step, including that of the loss."""
    _, loss, mesh = build(job)
    batch = my_share(rows, mesh)
    whole = divisor(batch, mesh)
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        accumulate_plainly(loss, micro_batches(batch, 1, loss.anatomy, mesh), whole, mesh)
    return spy.call_count


def test_replicas_all_reduce_only_at_the_last_micro_batch(four: Callable[..., Any]) -> None:
    rows = random_rows(12, 32, vocab=VOCAB, packed=False)
    # Two layers, embeddings, head and the root, and the loss.
    assert four(count_all_reduces, a_job(strategy={"fsdp_size": 2}), rows) == 6


def logits(job: JobSpec, rows: Rows) -> Tensor:
    """Return the logits of all rows [n, T, V], with the slices of the sequence joined."""
    model, loss, mesh = build(job)
    batch = my_share(rows, mesh)
    (micro,) = micro_batches(batch, len(batch.samples), loss.anatomy, mesh)
    with torch.no_grad():
        mine = model(
            input_ids=micro.input_ids, position_ids=micro.position_ids, use_cache=False, **micro.attention
        ).logits
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    slices = [torch.cat(parts[i : i + mesh.plan.sp], dim=1) for i in range(0, len(parts), mesh.plan.sp)]
    return torch.cat(slices)


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_changed_document_changes_no_logit_of_another(four: Callable[..., Any], sp: int) -> None:
    rows = random_rows(4, 32, vocab=VOCAB, packed=True)
    job = a_job(strategy={"ulysses_size": sp})
    before = four(logits, job, rows)
    # Sample 3 has several documents: change the first tokens of its second document.
    starts = (rows.position_ids[3] == 0).nonzero()[0].tolist()
    begin, end = starts[1], starts[2]
    rows.input_ids[3, begin:end] = (rows.input_ids[3, begin:end] + 1) % VOCAB
    changed = (four(logits, job, rows) != before).any(-1)
    assert changed[3, begin:end].all()
    changed[3, begin:end] = False
    assert not changed.any()


def varlen(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **given: Any) -> tuple[Tensor, None]:
    """Compute flash attention with document bounds, in plain code. [B, H, T, D] → [B, T, H, D]."""
    assert mask is None
    assert given["max_length_q"] == given["cu_seq_lens_q"].diff().max() == given["max_length_k"]
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B * T, H, D]
    bounds = given["cu_seq_lens_q"].tolist()
    parts = []
    for start, end in pairwise(bounds):
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in flat)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=given["scaling"])
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]), None


def _take_flash(model: Any, *_: Any) -> None:
    model.config._attn_implementation = "flash_attention_2"


def step_with_varlen(job: JobSpec, rows: Rows) -> Result:
    """Run a step through the code path of flash attention."""
    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = varlen
    try:
        with patch("train_loop.model.families.causal.family.apply_attention", _take_flash):
            return one_step(job, rows)
    finally:
        del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


@pytest.mark.parametrize("sp", [1, 2])
def test_document_bounds_equal_masks(sp: int) -> None:
    rows = random_rows(4, 32, vocab=VOCAB, packed=True)
    job = a_job(world=2, per_device=2 * sp, strategy={"ulysses_size": sp})
    assert_equal(on_ranks(2, step_with_varlen, job, rows)[0], reference(job, rows), tolerance=1e-5)


def _take_flex(model: Any, *_: Any) -> None:
    model.set_attn_implementation("flex_attention")


def logits_by_flex_and_sdpa(job: JobSpec, rows: Rows) -> tuple[Tensor, Tensor]:
    """Run forward passes only: on a CPU, flex_attention supports nothing else."""
    with patch("train_loop.model.families.causal.family.apply_attention", _take_flex):
        flex = logits(job, rows)
    return flex, logits(job, rows)


# With Ulysses, the same function gets whole sequences, and some of the heads.
@pytest.mark.parametrize("sp", [1, 2] if MORE else [2])
def test_flex_attention_separates_documents_like_masks(sp: int) -> None:
    rows = random_rows(4, 32, vocab=VOCAB, packed=True)
    flex, sdpa = on_ranks(sp, logits_by_flex_and_sdpa, a_job(world=sp, strategy={"ulysses_size": sp}), rows)[0]
    assert (flex - sdpa).abs().max() < 1e-5
