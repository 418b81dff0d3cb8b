"""Every family of models that a spec may name: packed rows on one and on two ranks have transformers' gradients.

`MORE=1` compares all families, which takes a minute; otherwise some that differ in heads, positions and masks.
"""

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.builders.families import FAMILIES, small
from tests.support.builders.specs import spec
from tests.support.ranks.gradients import accumulate_plainly, build, divisor, my_share, random_rows, whole
from tests.support.ranks.ranks import on_ranks
from train_loop.data.dataset import IGNORE, Rows
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches
from train_loop.model.families.causal.build import build_model
from train_loop.spec import JobSpec

SOME = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "biogpt",
    "diffllama",
    "minicpm3",
    "gemma3_text",
    "gemma3n_text",
    "bert",
)
CHOSEN = FAMILIES if os.environ.get("MORE") else SOME
LENGTH, ROWS = 32, 4
ENCODERS = {"bert", "bert-generation", "electra", "ernie", "roc_bert"}
"""Families of encoders whose positions begin at 0; they are decoders if their configs say so."""


def job_of(family: str, ulysses_size: int) -> JobSpec:
    config = small(family) | ({"is_decoder": True, "tie_word_embeddings": False} if family in ENCODERS else {})
    parts: dict[str, dict[str, Any]] = {
        "model": {"config": config, "gradient_checkpointing": "none"},
        "data": {"sequence_length": LENGTH},
        "training": {"per_device_train_batch_size": ROWS * ulysses_size // 2},
        "scaling": {"num_workers": 2},
    }
    model = build_model(spec(**parts).model)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = [] if model._no_split_modules else [type(max(lists, key=len)[0]).__name__]
    return spec(
        **parts, strategy={"ulysses_size": ulysses_size, "wrap_policy": {"transformer_layer_cls_to_wrap": layers}}
    )


def alone(model: PreTrainedModel, rows: Rows) -> Tensor:
    """Return the mean loss of documents that transformers computes one by one, without positions and masks."""
    total, labels = torch.zeros(()), 0
    for ids, targets, positions in zip(rows.input_ids, rows.labels, rows.position_ids, strict=True):
        starts = [*(positions == 0).nonzero()[0].tolist(), LENGTH]
        for start, stop in pairwise(starts):
            document = slice(start, stop)
            logits = model(input_ids=torch.from_numpy(ids[document])[None].long(), use_cache=False).logits[0]
            expected = torch.from_numpy(targets[document])[1:].long()
            total = total + F.cross_entropy(logits[:-1].float(), expected, ignore_index=IGNORE, reduction="sum")
            labels += int((expected != IGNORE).sum())
    return total / labels


def worst_error(family: str, ulysses_size: int) -> float | str:
    """Return the largest difference of loss and gradients from transformers', or why a model is rejected.

    A difference is relative to the gradient, or to a hundredth of the norm of all if that is larger.
    """
    try:
        job = job_of(family, ulysses_size)
        model, loss, mesh = build(job)
    except ModelError as error:
        return str(error)
    model.eval()  # without dropout
    rows = random_rows(ROWS, LENGTH, vocab=300, packed=True)
    plain: Any = AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa", dtype=torch.float32).eval()
    plain.load_state_dict({name: whole(value) for name, value in model.state_dict().items()}, strict=False)
    batch = my_share(rows, mesh)
    micro = micro_batches(batch, job.training.per_device_train_batch_size, loss.anatomy, mesh)
    mean = accumulate_plainly(loss, micro, divisor(batch, mesh), mesh)
    expected = alone(plain, rows)
    torch.autograd.backward(expected)
    references = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    least = torch.stack([gradient.norm() for gradient in references.values()]).norm() / 100
    errors = [(mean - expected.detach()).abs() / expected.detach().abs()]
    for name, parameter in model.named_parameters():
        if name in references:
            difference = whole(parameter.grad) - references[name]
            errors.append(difference.norm() / torch.maximum(references[name].norm(), least))
    return float(torch.stack(errors).max())


def all_errors(families: tuple[str, ...]) -> dict[str, list[float | str]]:
    return {family: [worst_error(family, ulysses_size) for ulysses_size in (1, 2)] for family in families}


def test_packed_rows_of_every_accepted_family_have_the_gradients_of_transformers() -> None:
    found = on_ranks(2, all_errors, CHOSEN)[0]
    accepted = {family: [error for error in errors if isinstance(error, float)] for family, errors in found.items()}
    assert {family: errors for family, errors in accepted.items() if max(errors, default=0) >= 1e-5} == {}
    assert {family for family, errors in accepted.items() if len(errors) == 2} >= {*SOME}
    if len(CHOSEN) > len(SOME):
        assert sum(len(errors) == 2 for errors in accepted.values()) >= 50
        assert {family for family, errors in accepted.items() if len(errors) == 1} == {"doge", "falcon"}
