"""A model's forward pass: no side effects of the probe, and the classification of errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.specs import LONGROPE, TINY, spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.faults.failure import failed
from train_loop.loop.batch import MicroBatch
from train_loop.loop.objectives.token_cross_entropy import TokenLoss
from train_loop.model.build import materialise
from train_loop.model.families.causal.attention import attention_inputs
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.positions import apply_longrope, position_inputs
from train_loop.model.families.causal.probe import probe


def ready(config: dict[str, Any]) -> Any:
    """Return a model with weights, made in the same order as in a run."""
    parts = spec(model={"config": config}).model
    anatomy = CAUSAL.build(parts)
    probe(anatomy)
    materialise(anatomy.model, CAUSAL.build(parts), seed=0, device=torch.device("cpu"))
    return anatomy.model


def batch(length: int) -> MicroBatch:
    ids = torch.arange(length)[None]
    return MicroBatch(dict.fromkeys(("input_ids", "labels", "position_ids"), ids), {"attention_mask": None}, last=True)


@pytest.mark.parametrize("length", [8, 24])
def test_probed_longrope_model_equals_transformers(length: int) -> None:
    model, peer = ready(LONGROPE), AutoModelForCausalLM.from_config(AutoConfig.for_model(**LONGROPE))
    peer.load_state_dict(model.state_dict())
    ids = torch.arange(length)[None]
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids, position_ids=ids, use_cache=False).logits for one in (model, peer))
    assert torch.equal(ours, theirs)


def test_longrope_factors_are_per_document() -> None:
    model = ready(LONGROPE)
    apply_longrope(model, part=0, parts=1)
    # A long document, and a short one of which only padding lies beyond the limit.
    sizes, length = [20, 7], 48
    ids = torch.arange(length)[None] % 384
    positions = torch.cat([torch.arange(sizes[0]), torch.arange(length - sizes[0])])[None]
    named = attention_inputs(model, positions) | position_inputs(model, ids, positions, torch.tensor([sum(sizes)]))
    assert named["document_lengths"][0, [0, 19, 20, 26]].tolist() == [20, 20, 7, 7]
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False, **named).logits
        for start, size in zip((0, sizes[0]), sizes, strict=True):
            alone = model(input_ids=ids[:, start : start + size], use_cache=False).logits
            torch.testing.assert_close(packed[:, start : start + size], alone)


def test_eager_attention_may_be_an_fsdp_unit_whose_class_is_of_another_file() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small("gemma2")), attn_implementation="eager")
    ids = torch.arange(8)[None]
    expected = model.eval()(input_ids=ids).logits
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type(f"FSDP{kind.__name__}", (kind,), {"__module__": nn.__name__})
    assert torch.equal(model(input_ids=ids).logits, expected)


def test_error_of_model_code_is_a_model_error_that_ends_the_run() -> None:
    config = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    with pytest.raises(
        ModelError, match=r"^GPT2LMHeadModel failed in its forward pass: IndexError: .*; the traceback"
    ) as raised:
        TokenLoss(CAUSAL.anatomy(ready(config | dict.fromkeys(("bos_token_id", "eos_token_id"), 0))))(batch(24))
    assert isinstance(raised.value.__cause__, IndexError)
    outcome = failed(raised.value)
    assert (outcome.code, outcome.retryable) == ("model_error", False)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError(), dist.DistBackendError("peer left")])
def test_memory_or_network_error_in_the_forward_pass_is_unchanged(error: Exception) -> None:
    model = ready(TINY)

    def fail(*_: Any) -> None:
        raise error

    model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(type(error)) as raised:
        TokenLoss(CAUSAL.anatomy(model))(batch(8))
    assert raised.value is error


def test_collective_error_in_the_forward_pass_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(TINY)
    # The group of a run exists. An error without it stands for those of gloo, which come from the same code.
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    model.model.layers[1].register_forward_pre_hook(lambda *_: dist.all_reduce(torch.zeros(1)))
    with pytest.raises(ValueError, match="process group") as raised:
        TokenLoss(CAUSAL.anatomy(model))(batch(8))
    assert not isinstance(raised.value, ModelError)
