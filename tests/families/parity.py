"""A step of a family's small model on a mesh, compared with a plain loop over transformers' own model."""

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.builders.specs import raw_spec
from tests.support.families.families import small
from tests.support.ranks.gradients import build, divisor, forget_meshes, my_share, random_rows, replaced
from train_loop.conformance.measure import accumulate_plainly, largest_difference, whole
from train_loop.data.dataset import IGNORE, Rows
from train_loop.loop.batch import micro_batches
from train_loop.model.families.causal.build import build_model
from train_loop.model.parts import own_parts
from train_loop.spec import ModelSpec, parse

LENGTH, ROWS, VOCAB = 32, 8, 300
TOLERANCE = 1e-5
"""Largest relative difference of the loss and of each gradient, from rounding in float32.

Packed rows of gemma3n come near: 9e-6. Its sparse activations have steps, so that a plain loop in float32 itself
differs from one in float64 by 3e-5.
"""


@dataclass(frozen=True)
class Case:
    """A mesh, and the rows of a step."""

    mesh: str
    world: int
    fsdp_size: int = 0
    ulysses_size: int = 1
    tp_size: int = 1
    packed: bool = False
    half_untrained: bool = False
    """True if the first half of the rows has no trained token."""
    others: tuple[tuple[str, str, Any], ...] = ()
    """Further fields of the spec: their part, name and value."""
    chunked_loss: bool = False


_MESHES = (
    Case("one rank", 1),
    Case("HSDP 2 x 2", 4, fsdp_size=2),
    Case("Ulysses 2", 2, ulysses_size=2),
    Case("Ulysses 4", 4, ulysses_size=4),
    Case("HSDP 2 x Ulysses 2", 4, fsdp_size=2, ulysses_size=2),
)
CASES = {
    **{f"{case.mesh}, plain": case for case in _MESHES},
    **{f"{case.mesh}, packed": replace(case, packed=True) for case in _MESHES},
    "one rank, chunked loss": replace(_MESHES[0], chunked_loss=True),
}


KINDS = (
    "qwen3",  # grouped kv heads, normalised queries and keys
    "gpt2",  # learned positions, and a config without num_key_value_heads
    "gpt_bigcode",  # one kv head for all
    "diffllama",  # differences of attention
    "minicpm3",  # latent attention
    "gemma2",  # capped scores and logits, without SDPA
    "gemma3n_text",  # layers that share keys and values, windows, and tables in each layer
    "granite_swa",  # sinks, and scaled logits
    "bloom",  # ALiBi
    "falcon_h1",  # attention and a recurrent state
    "mamba2",  # no attention
    "qwen3_moe",  # a mixture of experts
    "roberta",  # an encoder as a decoder, whose positions begin behind padding
    "bart",  # no positions as an argument
)
"""The families that every run of the tests computes: a new kind of model gets all tests of this folder by one line."""


class Settings(NamedTuple):
    """Settings that a spec of a family needs, in addition to the sizes of its config."""

    config: tuple[tuple[str, Any], ...] = ()
    layers: tuple[str, ...] = ()
    """Classes of layers for `transformer_layer_cls_to_wrap`, if transformers names none."""
    frozen: tuple[str, ...] = ()
    """Prefixes of modules that are not trained."""


NONE = Settings()


def uneven(family: str) -> Settings:
    """Return the settings of a family without dropout, with sizes of which ranks have unequal parts."""
    rates = {name: 0.0 for name, value in small(family).items() if "drop" in name and isinstance(value, float)}
    return Settings(config=(*rates.items(), ("vocab_size", VOCAB + 1), ("intermediate_size", 61)))


def raw_job(family: str, case: Case, settings: Settings = NONE) -> dict[str, Any]:
    """Return the spec of a family's small model."""
    raw = raw_spec(
        model={
            "config": small(family) | dict(settings.config),
            "dtype": "fp32",
            "gradient_checkpointing": "none",
        }
        | ({"freeze_module_prefix": [*settings.frozen]} if settings.frozen else {}),
        data={"sequence_length": LENGTH, "packing": case.packed},
        training={"per_device_train_batch_size": 2} | ({"chunked_loss": True} if case.chunked_loss else {}),
        strategy={
            "fsdp_size": case.fsdp_size,
            "ulysses_size": case.ulysses_size,
            "tp_size": case.tp_size,
            "wrap_policy": {"transformer_layer_cls_to_wrap": [*settings.layers]},
        },
        scaling={"num_workers": case.world},
    )
    for part, field, value in case.others:
        raw[part][field] = raw[part][field] | value if isinstance(value, dict) else value
    return raw


def advised(family: str, reason: str, settings: Settings) -> Settings:
    """Return the settings after a user has followed the advice of a reason; the same if it has none."""
    if found := re.search(r"set (\w+): (\S+) in the model's config", reason):
        return settings._replace(config=(*settings.config, (found[1], json.loads(found[2]))))
    if "add_cross_attention: true" in reason:
        return settings._replace(config=(*settings.config, ("add_cross_attention", False)))
    if found := re.search(r"set strategy\.wrap_policy\.transformer_layer_cls_to_wrap: \[(\w+)", reason):
        return settings._replace(layers=(found[1],))
    if "transformer_layer_cls_to_wrap, for example" in reason:
        model = build_model(ModelSpec.model_validate(raw_job(family, CASES["one rank, plain"], settings)["model"]))
        lists = [
            module
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and "vision" not in name
        ]
        return settings._replace(layers=(type(max(lists, key=len)[0]).__name__,))
    return settings


def differences(family: str, names: Sequence[str], settings: Settings) -> dict[str, float]:
    """Return the largest relative difference of each case, on the existing ranks."""
    torch.set_num_threads(1)
    # FSDP2 warns of outputs that are views, whose hooks an operation in place would lose.
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    forget_meshes()
    return {name: difference(family, CASES[name], settings) for name in names}


def untrained_first(rows: Rows) -> Rows:
    """Return the rows with no labels in the first half: a data rank then has no trained token."""
    labels = rows.labels.copy()
    labels[: ROWS // 2] = IGNORE
    return Rows({**rows.values, "labels": labels})


def difference(family: str, case: Case, settings: Settings) -> float:
    """Return the largest relative difference of loss and gradients from transformers' on rank 0; 0 on other ranks."""
    job = parse(raw_job(family, case, settings))
    model, loss, mesh = build(job)
    model.eval()  # without dropout
    plain = its_model(job.model)
    copy_weights(plain, model)
    rows = shorten(random_rows(ROWS, LENGTH, vocab=VOCAB, packed=case.packed), packed=case.packed)
    if case.half_untrained:
        rows = untrained_first(rows)
    batch = my_share(rows, mesh)
    micro = micro_batches(batch, job.training.micro_batch, loss.anatomy, mesh)
    mean = accumulate_plainly(loss, micro, divisor(batch, mesh), mesh)
    found = {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
    if dist.get_rank() > 0:
        return 0.0
    expected = alone(plain, rows)
    torch.autograd.backward(expected)
    error = float((mean - expected.detach()).abs() / expected.detach().abs())
    return max(error, largest_difference(found, {name: p.grad for name, p in plain.named_parameters()}))


def its_model(spec: ModelSpec) -> Any:
    """Return transformers' own model, without dropout; all ranks have the same weights."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config or {}), dtype=torch.float32).eval()
    fill(model)
    return model


def fill(model: PreTrainedModel) -> None:
    """Give a model weights with which every part of it matters: many models start with parts that are zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else parameter + 0.2 * noise)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy all parameters to a sharded model, also those that are buffers there: each model computes other buffers."""
    values, buffers = dict(source.named_parameters(remove_duplicate=False)), dict(target.named_buffers())
    for name in values.keys() & buffers.keys():
        buffers[name].copy_(values[name].detach())
    for name, parameter in target.named_parameters(remove_duplicate=False):
        for own, box in own_parts(parameter):
            own.copy_(values[name].detach()[box])


def shorten(rows: Rows, *, packed: bool) -> Rows:
    """Return rows of which some end early, as those that are not packed do; the rest is padding."""
    if packed:
        return rows
    ids, labels, lengths = rows.input_ids.copy(), rows.labels.copy(), lengths_of(rows).copy()
    for row in range(1, len(lengths), 3):
        lengths[row] = LENGTH - 5 - row
        ids[row, lengths[row] :] = 0
        labels[row, lengths[row] :] = IGNORE
    return replaced(rows, input_ids=ids, labels=labels, length=lengths)


def lengths_of(rows: Rows) -> Any:
    """Return the number of tokens of each row that are not padding."""
    return rows.values["length"]


def alone(model: PreTrainedModel, rows: Rows) -> Tensor:
    """Return the mean loss of documents that transformers computes one by one, without positions and masks."""
    total, labels = torch.zeros(()), 0
    for ids, targets, positions, length in zip(
        rows.input_ids, rows.labels, rows.position_ids, lengths_of(rows), strict=True
    ):
        starts = [*(positions[:length] == 0).nonzero()[0].tolist(), int(length)]
        for start, stop in pairwise(starts):
            document = slice(start, stop)
            logits = model(input_ids=torch.from_numpy(ids[document])[None].long(), use_cache=False).logits[0]
            expected = torch.from_numpy(targets[document])[1:].long()
            total = total + F.cross_entropy(logits[:-1].float(), expected, ignore_index=IGNORE, reduction="sum")
            labels += int((expected != IGNORE).sum())
    return total / labels
