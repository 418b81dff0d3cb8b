"""A step of a family's small model with a head of labels, compared with transformers' own class."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto import modeling_auto

from tests.families.parity import NONE, TOLERANCE, Settings, advised, copy_weights, fill
from tests.support.builders.specs import may_read, raw_spec
from tests.support.families.families import small
from tests.support.ranks.gradients import forget_meshes, mesh_of
from train_loop.conformance.measure import accumulate_plainly, largest_difference, whole
from train_loop.data.dataset import IGNORE, Dataset, Part, Rows
from train_loop.errors import ModelError
from train_loop.loop.batch import micro_batches, share_rows
from train_loop.loop.build import build_objective
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.causal.heads import names_outside
from train_loop.model.families.choose import family_of
from train_loop.model.folder import model_shape
from train_loop.model.load import match_folder
from train_loop.parallel.build import build_sharded
from train_loop.plan import plan_job
from train_loop.preflight.model import check_model
from train_loop.spec import parse

LENGTH, ROWS, VOCAB, LABELS = 24, 4, 300, 3
HEADS: dict[str, tuple[Any, dict[str, str]]] = {
    "sequence_classification": (
        AutoModelForSequenceClassification,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
    "token_classification": (
        AutoModelForTokenClassification,
        modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    ),
}
"""Class of each head, and its classes by family."""
FAMILIES = tuple(sorted({family for _, names in HEADS.values() for family in names}))


class Case(NamedTuple):
    """A number of ranks, and whether a row has two documents."""

    world: int
    packed: bool = False


CASES = (Case(1), Case(2), Case(1, packed=True))


def raw_job(family: str, head: str, case: Case, settings: Settings = NONE) -> dict[str, Any]:
    """Return the spec of a family's small model with a head."""
    label = {"labels": "tags"} if head == "token_classification" else {"label": "class"}
    return raw_spec(
        model={
            "config": small(family) | dict(settings.config),
            "head": {head: {} if head == "regression" else {"labels": LABELS}},
            "dtype": "fp32",
            "gradient_checkpointing": "none",
        },
        data={"sequence_length": LENGTH, "packing": case.packed, "columns": {"input_ids": "ids"} | label},
        training={"per_device_train_batch_size": 1, "global_batch_size": ROWS},
        strategy={"wrap_policy": {"transformer_layer_cls_to_wrap": [*settings.layers]}},
        scaling={"num_workers": case.world},
    )


def result(family: str, head: str, call_ranks: Any) -> str:
    """Return "equal", the reason why `POST /jobs` rejects the head, or a fault: text that begins with `FAULT`.

    A family may accept the head and not packed rows.
    """
    settings = NONE
    while (reason := refusal(family, head, CASES[0], settings)) is not None:
        better = advised(family, reason, settings)
        if better == settings:
            return reason
        settings = better
    try:
        if lost := lost_weights(family, head, settings):
            return f"FAULT: a folder of the language model does not give {lost[0]}"
    except ModelError as error:
        return str(error)  # transformers stores its weights in other parts
    for case in CASES:
        if case.packed and (head != "token_classification" or refusal(family, head, case, settings)):
            continue
        try:
            found = call_ranks(case.world, difference, family, head, case, settings)
        except AssertionError as error:
            return f"FAULT in {case}: {str(error).strip().splitlines()[-1:]}"
        if not found < TOLERANCE:
            return f"FAULT in {case}: differs by {found:.1e}"
    return "equal"


def lost_weights(family: str, head: str, settings: Settings) -> list[str]:
    """Return the weights outside of the head that a folder of the family's language model does not give."""
    job = parse(raw_job(family, head, CASES[0], settings))
    config, kind = AutoConfig.for_model(**job.model.config or {}), family_of(job)
    autos = [AutoModelForCausalLM] if kind is CAUSAL else [AutoModelForMaskedLM, AutoModel]
    auto = next(one for one in autos if type(config) in one._model_mapping)
    with TemporaryDirectory() as folder:
        auto.from_config(config).save_pretrained(folder)
        anatomy = kind.build(job.model.model_copy(update={"config": None, "path": folder}))
        homes = match_folder(anatomy, Path(folder)).homes
    own = homes.keys() - names_outside(anatomy.model)
    # Masked language models have no pooler.
    return [name for name in own if not homes[name] and "pooler." not in name]


def refusal(family: str, head: str, case: Case, settings: Settings) -> str | None:
    """Return the reason why `POST /jobs` rejects a family's head; None if it accepts it."""
    _, problems = check_model(parse(raw_job(family, head, case, settings)), may_read())
    return problems[0].message if problems else None


def difference(family: str, head: str, case: Case, settings: Settings) -> float:
    """Return the largest relative difference of loss and gradients from transformers' on rank 0; 0 on other ranks."""
    torch.set_num_threads(1)
    forget_meshes()
    job, rows = parse(raw_job(family, head, case, settings)), labelled_rows(packed=case.packed)
    mesh = mesh_of(job)
    sharded, plan = build_sharded(job, mesh), plan_job(job, model_shape(job.model))
    plain = its_model(job.model.config or {}, head)
    copy_weights(plain, sharded.model.eval())
    part = Part(fingerprint="x", files=(), tokens=0, input_ids="ids", targets="class")
    dataset = Dataset(fingerprint="x", parts=(part,), sequence_length=LENGTH, aligned=True)
    objective = build_objective(sharded, job, plan, dataset)
    count = ROWS // mesh.plan.dp
    mine = rows.slice(mesh.data_rank * count, (mesh.data_rank + 1) * count)
    batch = share_rows(mine, count=count, dataset=dataset, mesh=mesh)
    total = objective.divisor(batch)
    assert total is not None
    dist.all_reduce(total)
    mean = accumulate_plainly(objective, micro_batches(batch, 1, sharded.anatomy, mesh), total.item(), mesh)
    found = {name: None if p.grad is None else whole(p.grad) for name, p in sharded.model.named_parameters()}
    if dist.get_rank() > 0:
        return 0.0
    losses = torch.stack([*_its_losses(plain, rows, head)]).sum() / total
    torch.autograd.backward(losses)
    error = float((mean - losses.detach()).abs() / losses.detach().abs())
    return max(error, largest_difference(found, {name: p.grad for name, p in plain.named_parameters()}))


def its_model(config: dict[str, Any], head: str) -> Any:
    """Return transformers' own model with a head, without dropout; all ranks have the same weights."""
    number = head == "regression"
    auto, _ = HEADS["sequence_classification" if number else head]
    own = AutoConfig.for_model(**config | {"use_cache": False}, num_labels=1 if number else LABELS)
    torch.manual_seed(0)
    model = auto.from_config(own, dtype=torch.float32).eval()
    fill(model)
    return model


def _its_losses(model: Any, rows: Rows, head: str) -> Iterator[Tensor]:
    """Yield the summed loss of each document, which transformers computes alone and without padding."""
    for row, (length, label) in enumerate(zip(rows.values["length"], rows.values["targets"], strict=True)):
        starts = [*(rows.position_ids[row, :length] == 0).nonzero()[0].tolist(), int(length)]
        for document in (slice(start, stop) for start, stop in pairwise(starts)):
            tokens, tags = (torch.from_numpy(one[row, document])[None].long() for one in (rows.input_ids, rows.labels))
            labels, count = torch.tensor([float(label) if head == "regression" else int(label)]), 1
            if head == "token_classification":
                labels, count = tags, int((tags != IGNORE).sum())
            yield model(input_ids=tokens, labels=labels).loss * count


def labelled_rows(*, packed: bool) -> Rows:
    """Return rows of several lengths with padding, each with a class, and a class for some tokens."""
    draw, lengths = np.random.default_rng(0), np.array([LENGTH, 9, LENGTH - 1, 14])
    is_token, places = np.arange(LENGTH) < lengths[:, None], np.tile(np.arange(LENGTH), (ROWS, 1))
    ids = draw.integers(1, VOCAB, (ROWS, LENGTH))
    tags = np.where(draw.random((ROWS, LENGTH)) < 0.7, draw.integers(0, LABELS, (ROWS, LENGTH)), IGNORE)
    return Rows(
        {
            "#sample": np.arange(ROWS),
            "length": lengths,
            "input_ids": np.where(is_token, ids, 0).astype(np.int32),
            "labels": np.where(is_token, tags, IGNORE).astype(np.int32),
            "position_ids": (np.where(places < 6, places, places - 6) if packed else places).astype(np.int32),
            "targets": np.array([0, 2, 1, 2], np.float32),
        }
    )
