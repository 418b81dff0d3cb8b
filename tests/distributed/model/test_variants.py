"""Settings for memory, communication or computation that must not change results.

Their embeddings and head are FSDP units, unless they are tied; those of the plain model are in the root unit.

Without `MORE=1`, most variants run with one of two models; both have variants of every kind.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import train_loop.plan.memory.forward
from tests.support.builders.specs import TINY, spec
from tests.support.ranks.gradients import Gradients, one_step, random_rows
from tests.support.ranks.ranks import on_ranks
from train_loop.spec import JobSpec

SAMPLES, LENGTH = 8, 32
CONFIG = TINY | {"num_hidden_layers": 4}
Result = tuple[float, Gradients]
Case = tuple[str, int, bool]
"""A variant, and the model: the ranks of a sequence, and whether its weights are tied."""
Found = dict[Case, tuple[Result, Result]]
"""Results of each variant and model, and those of the plain model on the same ranks."""
Parts = dict[str, dict[str, Any]]

BIT_EQUAL: dict[str, Parts] = {
    "reshard true": {"strategy": {"reshard_after_forward": True}},
    "reshard false": {"strategy": {"reshard_after_forward": False}},
    "reshard to 2": {"strategy": {"reshard_after_forward": 2}},
    "prefetch": {"strategy": {"forward_prefetch": 2, "backward_prefetch": 3}},
    "prefetch of finer units": {
        "strategy": {
            "forward_prefetch": 2,
            "backward_prefetch": 2,
            "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3Attention", "Qwen3MLP"]},
        }
    },
    "offload": {"strategy": {"offload_policy": True}},
    "no recomputation": {"model": {"gradient_checkpointing": "none"}},
    "offloaded activations": {"model": {"gradient_checkpointing": "offload"}},
    "ends as units": {},
    "wrapped embeddings": {"strategy": {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": False}}},
    "wrapped head": {"strategy": {"wrap_policy": {"wrap_embeddings": False, "wrap_lm_output": True}}},
    "wrapped all": {"strategy": {"wrap_policy": {"wrap_embeddings": True, "wrap_lm_output": True}}},
    "finer units": {"strategy": {"wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer", "Qwen3MLP"]}}},
    "units by size": {"strategy": {"wrap_policy": {"min_num_params": 1000}}},
    "large units": {"strategy": {"wrap_policy": {"min_num_params": 9000}}},
    "output dtype": {"strategy": {"output_dtype": "fp32"}},
    "every second layer": {"model": {"gradient_checkpointing": {"every": 2}}},
    "selective": {"model": {"gradient_checkpointing": "selective"}},
    "each layer": {"model": {"gradient_checkpointing": {"every": 1}}},
    "selective, offloaded": {
        "model": {"gradient_checkpointing": "selective"},
        "strategy": {"offload_policy": True, "reshard_after_forward": True},
    },
}
EQUAL: dict[str, Parts] = {
    "tiles": {"strategy": {"apply_tiled_mlp": True}},
    "tiles that do not divide": {"strategy": {"apply_tiled_mlp": True, "tiled_num_shards": 5}},
    "more tiles than rows": {"strategy": {"apply_tiled_mlp": True, "tiled_num_shards": 1000}},
    "norms of their own": {"strategy": {"norm_dtype": "fp32"}},
    "chunked head": {"training": {"chunked_loss": True}},
    "chunked, wrapped head": {
        "training": {"chunked_loss": True},
        "strategy": {"wrap_policy": {"wrap_lm_output": True}},
    },
    "chunked, resharded": {"training": {"chunked_loss": True}, "strategy": {"reshard_after_forward": True}},
    "replicas": {"strategy": {"sharding_strategy": "NO_SHARD"}},
    "hybrid": {"strategy": {"fsdp_size": 2}},
    "whole norms and MLP": {"strategy": {"ignored_params": ["*norm*", "model.layers.0.mlp", "lm_head.weight"]}},
    "whole norms, hybrid": {"strategy": {"ignored_params": ["*norm*", "model.embed_tokens"], "fsdp_size": 2}},
    "exchanged once": {"strategy": {"gradient_sync": "last"}},
    "exchanged once, chunked": {"training": {"chunked_loss": True}, "strategy": {"gradient_sync": "last"}},
    "exchanged once, hybrid": {"strategy": {"gradient_sync": "last", "fsdp_size": 2}},
    "selective tiles": {
        "model": {"gradient_checkpointing": "selective"},
        "strategy": {"apply_tiled_mlp": True},
    },
    "selective, chunked head": {
        "model": {"gradient_checkpointing": "selective"},
        "training": {"chunked_loss": True},
    },
}
LAYERS: Parts = {"strategy": {"wrap_policy": {"wrap_embeddings": False, "wrap_lm_output": False}}}
"""A model whose embeddings and head are in the root unit, with which variants are compared."""
MODELS = [(1, False), (2, True)]
ON_BOTH_MODELS = {
    "ends as units",
    "wrapped embeddings",
    "wrapped head",
    "wrapped all",
    "chunked head",
    "chunked, wrapped head",
}
"""Variants of the head and the embeddings, which are one parameter if they are tied."""
ON_FOUR_RANKS = {"reshard to 2", "hybrid", "exchanged once, hybrid", "whole norms, hybrid"}
"""Variants that divide the ranks; two ranks are enough for the others."""


def cases(variants: dict[str, Parts]) -> list[Case]:
    """Return the variants, each with the models that it runs with."""
    return [
        (name, *model)
        for number, name in enumerate(variants)
        for place, model in enumerate(MODELS)
        if "MORE" in os.environ or name in ON_BOTH_MODELS or place == number % len(MODELS)
    ]


def job(parts: Parts, sp: int, tied: bool) -> JobSpec:
    base: Parts = {
        "model": {"config": CONFIG | {"tie_word_embeddings": tied}, "gradient_checkpointing": "full"},
        "data": {"sequence_length": LENGTH},
        "training": {"per_device_train_batch_size": 2, "chunked_loss": False},
        "strategy": {"ulysses_size": sp},
        "scaling": {"num_workers": dist.get_world_size()},
    }
    return spec(**{name: base.get(name, {}) | parts.get(name, {}) for name in base})


def run_all(chosen: list[Case]) -> Found:
    """Run variants, and the plain models."""
    train_loop.plan.memory.forward.CHUNK_BYTES = 12 * TINY["vocab_size"] * 5  # chunks of 5 tokens
    rows = random_rows(SAMPLES, LENGTH, vocab=TINY["vocab_size"], packed=True)
    found: Found = {}
    for sp, tied in MODELS:
        plain = one_step(job(LAYERS, sp, tied), rows)
        for case in chosen:
            if case[1:] == (sp, tied):
                found[case] = one_step(job((BIT_EQUAL | EQUAL)[case[0]], sp, tied), rows), plain
    return found if dist.get_rank() == 0 else {}


@pytest.fixture(scope="module")
def found() -> Found:
    result = Found()
    for world in (2, 4):
        chosen = [case for case in (*cases(BIT_EQUAL), *cases(EQUAL)) if (case[0] in ON_FOUR_RANKS) == (world == 4)]
        result |= on_ranks(world, run_all, chosen)[0]
    return result


@pytest.mark.parametrize(("name", "sp", "tied"), cases(BIT_EQUAL))
def test_variant_is_bit_equal(found: Found, name: str, sp: int, tied: bool) -> None:
    (loss, gradients), (expected_loss, expected) = found[name, sp, tied]
    assert loss == expected_loss
    assert gradients.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(gradients[n], expected[n])] == []


@pytest.mark.parametrize(("name", "sp", "tied"), cases(EQUAL))
def test_variant_is_numerically_equal(found: Found, name: str, sp: int, tied: bool) -> None:
    (loss, gradients), (expected_loss, expected) = found[name, sp, tied]
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for parameter, value in expected.items():
        assert (gradients[parameter] - value).norm() <= 1e-6 * value.norm(), parameter
