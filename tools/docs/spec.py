"""The reference of the job spec, from its pydantic models."""

import json
import re
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from tools.docs.markdown import code, sentence, table
from tools.docs.types import models_in, rules, supported, type_name
from train_loop.spec import DataSpec, InferSpec, JobSpec, ModelSpec
from train_loop.spec.kinds.any_kind import KINDS
from train_loop.spec.kinds.infer import InferDataSpec, InferModelSpec

EXAMPLES: dict[str, Any] = {
    "name": "my-run",
    "labels": {"team": "nlp"},
    "code": {
        "package": "file:///code/mymodel",
        "model": "mymodel:build",
        "loss": "mymodel:loss",
        "batch": "mymodel:batch",
    },
    "code.package": "file:///code/mymodel",
    "code.model": "mymodel:build",
    "code.loss": "mymodel:loss",
    "code.batch": "mymodel:batch",
    "code.config": {"width": 1024},
    "code.sums": ["correct"],
    "model": {"path": "file:///models/Qwen3-0.6B"},
    "model.path": "file:///models/Qwen3-0.6B",
    "model.config": {"model_type": "qwen3", "vocab_size": 8192},
    "model.tokenizer": "file:///models/Qwen3-0.6B",
    "model.job": "job-01j9x3v5k8m2n4p6q7r8s9t0ab",
    "model.step": 400,
    "model.weights": "ema",
    "model.gradient_checkpointing": "selective",
    "model.gradient_checkpointing.every": 2,
    "model.gradient_checkpointing.budget": 0.5,
    "model.freeze_module_prefix": ["model.embed_tokens"],
    "data": {"train": {"path": "stdlib://"}},
    "data.train": {"path": "file:///data/*.parquet"},
    "data.train.path": "s3://corpus/web/",
    "data.train.weight": 3,
    "data.train.columns": {"text": "body"},
    "data.eval": {"path": "file:///held-out/*.parquet"},
    "data.columns.text": "text",
    "training.reduction_tree.max_shards": 8,
    "data.columns.input_ids": "input_ids",
    "data.columns.labels": "labels",
    "data.columns.messages": "messages",
    "data.columns.tools": "tools",
    "data.columns.prompt": "prompt",
    "data.columns.response": "response",
    "data.columns.chosen": "chosen",
    "data.columns.rejected": "rejected",
    "data.columns.margin": "margin",
    "data.columns.anchor": "question",
    "data.columns.positive": "answer",
    "data.columns.negatives": ["other"],
    "data.columns.weight": "weight",
    "data.columns.own": ["image", "label"],
    "data.system_prompt": "You are a helpful assistant.",
    "data.on_long_rows": "truncate",
    "training": {"learning_rate": 1e-4},
    "training.learning_rate": 1e-4,
    "training.momentum": 0.9,
    "training.groups": [{"params": ["*lora_B*"], "lr_scale": 16}],
    "training.groups.params": ["model.embed_tokens", "lm_head"],
    "training.groups.learning_rate": 0.001,
    "training.groups.lr_scale": 0.1,
    "training.groups.weight_decay": 0.0,
    "training.groups.betas": [0.9, 0.95],
    "training.layer_decay": 0.75,
    "training.ema_decay": 0.999,
    "training.gradient_accumulation_steps": 8,
    "training.global_batch_size": 64,
    "training.num_train_epochs": 2,
    "training.max_steps": 1000,
    "training.max_tokens": 1_000_000_000,
    "training.eval_steps": 100,
    "training.chunked_loss": True,
    "training.profile_steps": [10, 11],
    "strategy.output_dtype": "fp32",
    "strategy.norm_dtype": "fp32",
    "strategy.precision": {"model.layers.0": "fp32", "lm_head": "fp32"},
    "strategy.ignored_params": ["model.norm.weight"],
    "strategy.reshard_after_forward": 4,
    "strategy.wrap_policy.transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
    "strategy.wrap_policy.min_num_params": 100_000_000,
    "checkpoint.every_seconds": 600,
    "checkpoint.keep_best": {"metric": "eval_loss", "mode": "min"},
    "model.head.sequence_classification.labels": 3,
    "data.columns.label": "label",
    "checkpoint.keep_best.metric": "eval_loss",
    "checkpoint.keep_best.mode": "min",
    "scaling.num_workers": {"min": 2, "max": 8},
    "scaling.num_workers.min": 2,
    "scaling.num_workers.max": 8,
    "scaling.resources_per_worker": {"CPU": 1, "GPU": 1},
}
"""An example for each field whose default is none or uninformative; the others show their default."""


@dataclass(frozen=True)
class Section:
    """One model of the spec, at its path."""

    path: str
    model: type[BaseModel]
    of_training: type[BaseModel] | None = None
    """The same part of a training job, if this is that of another kind; only the differences are listed."""

    @property
    def title(self) -> str:
        """Return its heading."""
        return f"{self.path}, with kind: infer" if self.of_training else self.path or "The job"

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """Return the fields to list."""
        known = self.of_training.model_fields if self.of_training else {}
        return {
            name: field
            for name, field in self.model.model_fields.items()
            if name not in known or field.description != known[name].description
        }

    def path_of(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.path}.{name}" if self.path else name


def page() -> str:
    """Return the Markdown of the page."""
    parts = [
        "# Job spec\n\n[Job specs](../guides/spec.md) has an annotated example. `—` as a default means that the field "
        "is required. Rules that tie several fields together are checked at submission; an error names the fields, the "
        "values and a remedy.\n"
    ]
    for title, forms in groupby(sections(), key=lambda section: section.title):
        # A part with several forms has one heading, and a table for each.
        parts.append(f"## {title}\n")
        for section in forms:
            rows = [_row(section, name, field) for name, field in section.fields.items()]
            parts.append(f"{sentence(_summary(section.model))}\n")
            parts.append(table(("field", "type", "default", "rule", "example", "meaning"), rows))
    return "\n".join(parts)


def sections() -> list[Section]:
    """Return the models of the spec, each at its shortest path, in the order of the top-level fields.

    Parts that the code does not support yet are left out.
    """
    found = [Section("", JobSpec), Section("infer", InferSpec)]
    for section in found:
        for name, field in section.model.model_fields.items():
            for model in models_in(field.annotation) if supported(field) is None else ():
                if all(one.model is not model for one in found):
                    found.append(Section(section.path_of(name), model))
    found += [Section("model", InferModelSpec, ModelSpec), Section("data", InferDataSpec, DataSpec)]
    first = ["", *JobSpec.model_fields]
    return sorted(found, key=lambda one: first.index(one.path.partition(".")[0]))


_LINKS = {one.model: f"[fields of {one.path}](#{re.sub(r'[^a-z0-9_-]', '', one.path)})" for one in sections()}


def example(section: Section, name: str, field: FieldInfo) -> Any:
    """Return an example of a field's value, as YAML would hold it."""
    path, allowed = section.path_of(name), supported(field)
    if path in EXAMPLES and (allowed is None or EXAMPLES[path] in allowed):
        return EXAMPLES[path]
    return to_jsonable_python(field.get_default(call_default_factory=True))


def _row(section: Section, name: str, field: FieldInfo) -> tuple[str, ...]:
    limits = sentence(", ".join(_rules(section, name, field)))
    shown = "" if _lists_fields(section, name, field) else code(f"{name}: {_yaml(example(section, name, field))}")
    return (
        code(name),
        type_name(field.annotation, _LINKS),
        _default(field),
        limits,
        shown,
        sentence(field.description or ""),
    )


def _rules(section: Section, name: str, field: FieldInfo) -> list[str]:
    """Return the rules of a field. What belongs to another kind of job is not one to come."""
    others = {kind: model.model_fields.get(name) for kind, model in KINDS.items() if model is not JobSpec}
    kinds = [kind for kind, other in others.items() if other is not None and supported(other) is None]
    if section.model is JobSpec and supported(field) == (None,) and kinds:
        return [f"only with `kind: {kinds[0]}`"]
    return [rule.removesuffix(" today") if section.of_training else rule for rule in rules(field)]


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "—"
    # The section of a part lists the defaults of its fields.
    return "those of its fields" if isinstance(default, BaseModel) else code(_yaml(to_jsonable_python(default)))


def _lists_fields(section: Section, name: str, field: FieldInfo) -> bool:
    """Return whether the fields of a part have their own examples, and the part has none."""
    return section.path_of(name) not in EXAMPLES and isinstance(field.get_default(), BaseModel)


def _summary(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").split("\n\n")[0]


def _yaml(value: Any) -> str:
    """Return a value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str):
        return value if value and not set(value) & set(":#{}[],*") else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
