"""A model whose weights are those of a job's checkpoint: the rest of it comes from the spec of that job."""

from typing import Any, Literal, NamedTuple

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.heads import CAUSAL_LM, EmbeddingSpec, Head, LabelHeadSpec
from train_loop.spec.model import ModelSpec


class CheckpointSource(NamedTuple):
    """A checkpoint as a spec names it."""

    job: str
    step: int | Literal["latest"]
    weights: Literal["model", "ema"]


def model_of_job(
    model: ModelSpec, job: str, of: ModelSpec, tokenizer: str | None, *, reads_text: bool
) -> dict[str, Any]:
    """Return path, config, tokenizer, adapters and head of the job that has trained a spec's model.

    The spec may name the tokenizer of a job that was trained on tokenised rows, and an embedding head. Raises
    SpecError if it names another model, or if text has no tokenizer.
    """
    own = model.tokenizer if of.path is None else None
    found = of.tokenizer or tokenizer or own if reads_text else None
    theirs: dict[str, Any] = {"path": of.path, "config": of.config, "tokenizer": found, "lora": of.lora}
    theirs["quantize_base"] = of.quantize_base
    problems = [
        Problem(f"/model/{name}", f"{name} is not that of {job}, whose checkpoint model.job reads; remove {name}")
        for name, value in theirs.items()
        if getattr(model, name) not in (None, value)
    ]
    if reads_text and found is None and of.path is None:
        message = f"{job} was trained on tokenised rows and names no tokenizer; add model.tokenizer"
        problems.append(Problem("/model/tokenizer", message))
    if of.lora is not None and of.path is None:
        message = f"{job} has adapters for random weights, which only its own run can draw; name another job"
        problems.append(Problem("/model/job", message))
    if problems:
        raise SpecError(problems)
    return {**theirs, "head": _readable(of.head) if model.head == CAUSAL_LM else model.head}


def _readable(head: Head) -> Head:
    """Return a head without the settings of its loss."""
    if not isinstance(head, LabelHeadSpec) or head.embedding is None:
        return head
    embedding = head.embedding
    return LabelHeadSpec(embedding=EmbeddingSpec(pooling=embedding.pooling, normalize=embedding.normalize))
