"""The plan of generation: memory of the cache and of the last logits, and tokens that a model does not have."""

import pytest

from tests.support.builders.specs import TINY, infer_spec
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.spec import SpecError, parse_any


def test_plan_counts_the_cache_and_the_logits_of_one_token_per_row() -> None:
    generation = {"max_new_tokens": 96}
    job = parse_any(infer_spec(infer={"output": "generate", "batch_size": 3, "generation": generation}))
    shape = model_shape(job.model)
    sizes = {term.name: term.bytes for term in plan_job(job, shape).memory}
    assert sizes["kv_cache"] == 2 * 4 * 3 * (32 + 96) * shape.layers * shape.kv_heads * shape.head_dim
    assert sizes["logits"] == 3 * shape.vocab * (4 + 40)
    # The model has 2 kv heads: with 4 ranks, two of them keep the same one.
    for field, workers, parts in (("tp_size", 2, 2), ("ulysses_size", 2, 2), ("ulysses_size", 4, 2)):
        shared = job.model_copy(update={"strategy": job.strategy.model_copy(update={field: workers})}).at(workers)
        (part,) = (term.bytes for term in plan_job(shared, shape).memory if term.name == "kv_cache")
        assert parts * part == sizes["kv_cache"]
    scored = plan_job(parse_any(infer_spec()), shape)
    assert "kv_cache" not in {term.name for term in scored.memory}


def test_plan_counts_the_mask_of_uneven_rows() -> None:
    """transformers makes a mask [n, 1, T, T] for rows with padding on the left; sdpa copies it in the compute dtype."""
    found = {}
    for rows, sp in ((1, 1), (3, 1), (3, 2)):
        job = parse_any(
            infer_spec(
                infer={"output": "generate", "batch_size": rows},
                strategy={"ulysses_size": sp},
                scaling={"num_workers": sp},
            )
        )
        terms = plan_job(job, model_shape(job.model)).memory
        found[rows, sp] = next(term.bytes for term in terms if term.name == "attention_mask")
    assert found == {(1, 1): 0, (3, 1): (1 + 4) * 3 * 32**2, (3, 2): 0}


def test_whole_model_on_each_worker_gathers_nothing() -> None:
    shape = model_shape(parse_any(infer_spec()).model)
    gathered = {}
    for workers, strategy in ((1, {}), (2, {}), (2, {"sharding_strategy": "NO_SHARD"}), (1, {"norm_dtype": "fp32"})):
        model = {"config": TINY, "dtype": "bf16"}
        job = parse_any(infer_spec(model=model, scaling={"num_workers": workers}, strategy=strategy))
        sizes = {term.name: term.bytes for term in plan_job(job, shape).memory}
        gathered[workers, *strategy] = sizes["gathered_parameters"] > 0
    assert gathered == {(1,): False, (2,): True, (2, "sharding_strategy"): False, (1, "norm_dtype"): True}


def test_stop_token_outside_of_the_vocabulary_is_refused() -> None:
    vocabulary = TINY["vocab_size"]
    generation = {"stop_tokens": [vocabulary - 1, vocabulary]}
    job = parse_any(infer_spec(infer={"output": "generate", "generation": generation}))
    with pytest.raises(SpecError) as raised:
        plan_job(job, model_shape(job.model))
    assert [(one.pointer, one.message) for one in raised.value.problems] == [
        (
            "/infer/generation/stop_tokens",
            f"token {vocabulary} is outside of the model's vocabulary of {vocabulary}; remove it",
        )
    ]
