"""`model:` the model to train."""

import json
import os
import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import to_json

from train_loop.spec.base import SpecModel, check_folder, is_default, only
from train_loop.spec.heads import CAUSAL_LM, WITH_DEFAULTS, Head, LabelHeadSpec
from train_loop.spec.masked import MASKED_LM, MaskedHeadSpec, MaskedLmSpec

_HUB = re.compile(r"(?:https?://[^/]+/|hf://)?([A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)/?")
"""A model's id or URL on the Hugging Face Hub, with the id as its group."""
Dtype = Literal["bf16", "fp16", "fp32"]
ALL_LINEAR: Literal["all-linear"] = "all-linear"
_ModuleName = Annotated[str, StringConstraints(min_length=1)]


class EverySpec(SpecModel):
    """Recomputation of some layers."""

    every: int = Field(ge=1, description="the first of each group of this many layers is recomputed; 1 equals full")

    def __str__(self) -> str:
        return f"{{every: {self.every}}}"


class BudgetSpec(SpecModel):
    """Recomputation by the memory budget of torch.compile."""

    budget: float = Field(
        ge=0,
        le=1,
        description="share of a layer's activations that torch.compile keeps, from 0 (inputs only, as full) to 1 "
        "(its default)",
    )

    def __str__(self) -> str:
        return f"{{budget: {self.budget:g}}}"


def _kind_of_checkpointing(value: Any) -> str:
    if isinstance(value, EverySpec) or (isinstance(value, dict) and "every" in value):
        return "EverySpec"
    return "BudgetSpec" if isinstance(value, BudgetSpec | dict) else "str"


Checkpointing = Annotated[
    Annotated[Literal["none", "full", "offload", "selective"], Tag("str")]
    | Annotated[EverySpec, Tag("EverySpec")]
    | Annotated[BudgetSpec, Tag("BudgetSpec")],
    Discriminator(_kind_of_checkpointing),
]


class LoraSpec(SpecModel):
    """Low-rank adapters (Hu et al., 2021) on a frozen model, by peft."""

    r: int = Field(default=16, gt=0, description="rank of the adapters")
    alpha: float = Field(
        default=32, gt=0, description="scale of the adapters: they count alpha / r, with use_rslora alpha / sqrt(r)"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout probability of the adapters' inputs")
    target_modules: Literal["all-linear"] | tuple[_ModuleName, ...] = Field(
        default=ALL_LINEAR,
        description="modules with adapters, by name or its last parts, as q_proj; all-linear: every linear layer but "
        "the head and routers of experts",
    )
    target_parameters: tuple[_ModuleName, ...] = Field(
        default=(),
        description="parameters with adapters, by name or its last parts: the tensors of all experts of a layer, as "
        "experts.gate_up_proj",
    )
    modules_to_save: tuple[_ModuleName, ...] = Field(
        default=(),
        description="modules that are trained whole, with the adapters: all whose full names end with one of these, so "
        "that norm is also input_layernorm; and what the folder lacks and begins random",
    )
    use_rslora: bool = Field(default=False, description="scale adapters by alpha / sqrt(r)")
    use_dora: bool = Field(default=False, description="also train the magnitude of each output of a target (DoRA)")
    init: Annotated[
        Literal["kaiming", "gaussian", "orthogonal", "pissa", "olora", "eva", "corda", "loftq"],
        only("kaiming", "gaussian"),
    ] = Field(
        default="kaiming",
        description="initial values of A; B starts at 0; kaiming: those of a linear layer; gaussian: with a standard "
        "deviation of 1 / r",
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None, description="numbers of the layers with adapters, from 0; null: all"
    )

    @property
    def scale(self) -> float:
        """The factor of B·A."""
        return self.alpha / (self.r**0.5 if self.use_rslora else self.r)

    @field_validator("target_modules", mode="before")
    @classmethod
    def _is_a_list(cls, targets: Any) -> Any:
        if targets == ALL_LINEAR:
            return targets
        if isinstance(targets, str):
            raise ValueError(f"{targets:.100} is not a list; write [{targets:.100}], or {ALL_LINEAR}")
        if not isinstance(targets, list | tuple) or not all(isinstance(name, str) and name for name in targets):
            raise ValueError(f"{to_json(targets).decode():.100} is not a list of names; write one, or {ALL_LINEAR}")
        return tuple(targets)

    @model_validator(mode="after")
    def _adapts_something(self) -> "LoraSpec":
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules and target_parameters are both empty, which leaves no adapters; name one, or choose "
                "target_modules: all-linear"
            )
        if self.layers == ():
            raise ValueError("layers names no layer, which leaves no adapters; name one, or remove layers")
        return self

    @model_validator(mode="after")
    def _parameters_have_no_inputs(self) -> "LoraSpec":
        if self.target_parameters and self.dropout:
            raise ValueError(
                f"dropout={self.dropout} needs the inputs of adapters, and those of target_parameters are added to the "
                "weights; set dropout: 0, or remove target_parameters"
            )
        if self.target_parameters and self.use_dora:
            raise ValueError(
                "use_dora is for linear layers, and peft has none for target_parameters; set use_dora: false, or "
                "remove target_parameters"
            )
        return self


class ModelSpec(SpecModel):
    """A Hugging Face decoder: a folder of weights at `path`, or random weights from a `config`.

    With `code` it has neither."""

    path: str | None = Field(
        default=None, description="URI of a Hugging Face model folder (config.json, safetensors) below a storage root"
    )
    config: dict[str, Any] | None = Field(
        default=None, description="Hugging Face config with a model_type; the weights start random"
    )
    tokenizer: str | None = Field(
        default=None,
        description="URI of a Hugging Face tokenizer folder [default: path]; without path, a byte-level BPE of "
        "config.vocab_size tokens is trained on data.train",
    )
    head: Head = Field(
        default=CAUSAL_LM,
        description="head of the model and its loss: causal_lm, reward, embedding, masked_lm or {masked_lm: {…}} for "
        "encoders, or one of {sequence_classification: {labels: n}}, {token_classification: {labels: n}}, "
        "{regression: {}}",
    )
    load: Literal["every_rank", "rank0"] = Field(
        default="every_rank",
        exclude_if=is_default("every_rank"),
        description="readers of the weights at path: every_rank: each worker reads its own slices; rank0: one worker "
        "of each replica reads all of them and sends them to the others",
    )
    dtype: Dtype = Field(default="bf16", description="compute dtype; fp16 uses a gradient scaler")
    master_dtype: Dtype = Field(
        default="fp32", description="dtype of weights, gradients and optimizer states between steps; fp32 or bf16"
    )
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] = Field(
        default="auto",
        description="attention kernel; auto: flash if it is installed and the GPU supports it, else sdpa, or flex "
        "for very long packed samples; families without sdpa use flex on GPUs, or whole matrices of scores",
    )
    experts_implementation: Literal["auto", "grouped_mm", "eager"] = Field(
        default="auto",
        description="kernels of a mixture of experts; auto: grouped_mm if model, sizes and GPU allow it; eager: one "
        "expert after the other",
    )
    router_dtype: Literal["fp32"] | None = Field(
        default="fp32",
        description="dtype in which routers of a mixture of experts compute; null: the compute dtype",
    )
    router_bias_update: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="step by which each optimizer step moves the biases that routers add to scores to choose experts "
        "(e_score_correction_bias) towards equal loads; null: they stay",
    )
    gradient_checkpointing: Checkpointing = Field(
        default="full",
        description="full: recompute each layer in the backward pass; offload: also keep its input in host memory; "
        "{every: n}: recompute one of n layers; selective: keep results of attention and of every second matrix "
        "product; {budget: 0..1}: let torch.compile choose; none: keep all activations",
    )
    freeze_module_prefix: tuple[str, ...] = Field(
        default=(), description="prefixes of module names whose parameters are not trained"
    )
    lora: LoraSpec | None = Field(
        default=None, description="train low-rank adapters, and nothing else; null: train all weights"
    )
    adapter: str | None = Field(
        default=None,
        exclude_if=is_default(None),
        description="URI of a folder with adapters that peft wrote for the model at path (adapter_config.json, "
        "adapter_model.safetensors); the run continues from them, and lora has their settings",
    )
    quantize_base: Literal["nf4", "int8"] | None = Field(
        default=None,
        exclude_if=is_default(None),
        description="store the frozen weights of linear layers below adapters in four bits (nf4, as QLoRA) or eight "
        "(int8); they are restored in the compute dtype for each product; null: in master_dtype",
    )
    compile: bool = Field(
        default=False, description="apply torch.compile to each innermost unit of strategy.wrap_policy"
    )

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _is_a_word_or_one_number(cls, value: Any) -> Any:
        if isinstance(value, str | EverySpec | BudgetSpec) or (
            isinstance(value, dict) and len(value) == 1 and value.keys() <= {"every", "budget"}
        ):
            return value
        shown = json.dumps(value, default=str)
        raise ValueError(
            f"invalid gradient_checkpointing {shown:.100}; expected none, full, offload, selective, {{every: n}} or "
            "{budget: 0..1}"
        )

    @model_validator(mode="after")
    def _budget_is_of_the_compiler(self) -> "ModelSpec":
        if isinstance(self.gradient_checkpointing, BudgetSpec) and not self.compile:
            raise ValueError(
                f"gradient_checkpointing={self.gradient_checkpointing} is a memory budget of torch.compile, and "
                "compile is false; set compile: true, or choose selective or {every: 2}"
            )
        return self

    @property
    def has_source(self) -> bool:
        """True if the model comes from a folder or a config; else it is that of own code."""
        return self.path is not None or self.config is not None

    @property
    def is_of_job(self) -> bool:
        """True if a job's checkpoint has the weights. Its service has then added that job's model to the spec."""
        return False

    @model_validator(mode="after")
    def _at_most_one_source(self) -> "ModelSpec":
        if self.path is not None and self.config is not None:
            raise ValueError("exactly one of model.path and model.config is needed, and both are given; remove one")
        if self.path is None and self.load != "every_rank":
            raise ValueError(f"load={self.load} has no effect without model.path, whose files it reads; remove it")
        if self.adapter is not None and self.path is None:
            raise ValueError("adapter needs the model that it was trained on; set model.path, or remove adapter")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config needs a model_type, for example model_type: qwen3")
        return self

    @model_validator(mode="after")
    def _quantised_weights_are_frozen(self) -> "ModelSpec":
        if self.quantize_base is None:
            return self
        chosen = f"quantize_base={self.quantize_base}"
        if self.lora is None and self.adapter is None and not self.is_of_job:
            raise ValueError(
                f"{chosen} stores weights that are frozen, and without lora all are trained; add lora, or remove "
                "quantize_base"
            )
        if self.dtype == "fp16":
            raise ValueError(f"{chosen} is not proven with dtype=fp16; choose bf16, or remove one")
        if self.lora is not None and self.lora.use_dora:
            raise ValueError(
                f"{chosen} is not supported with use_dora, which computes norms of whole weights in each step; set "
                "use_dora: false, or remove quantize_base"
            )
        return self

    @property
    def label_head(self) -> LabelHeadSpec | None:
        """The head of labels; None if the model predicts tokens."""
        return self.head if isinstance(self.head, LabelHeadSpec) else None

    @property
    def masked(self) -> MaskedLmSpec | None:
        """The mask of a masked language model; None for other heads."""
        if isinstance(self.head, MaskedHeadSpec):
            return self.head.masked_lm
        return MaskedLmSpec() if self.head == MASKED_LM else None

    @property
    def ends_text(self) -> bool:
        """True if EOS follows text; heads of labels and masked ones read text as transformers' tokenizers write it."""
        head = self.label_head
        return self.masked is None and (head is None or head.reward is not None)

    @field_validator("head")
    @classmethod
    def _head_has_settings(cls, head: Head) -> Head:
        return LabelHeadSpec.model_validate({head: {}}) if head in WITH_DEFAULTS else head

    @field_validator("path", "tokenizer", "adapter")
    @classmethod
    def _is_on_storage(cls, uri: str | None) -> str | None:
        if uri is None or os.path.isabs(uri):
            return uri
        on_hub = _HUB.fullmatch(uri)
        if on_hub is not None:
            folder = f"/models/{on_hub[1].rpartition('/')[2]}"
            raise ValueError(
                f"{uri} is not a folder on shared storage, and models are not downloaded from the Hugging Face Hub; "
                f"run `hf download {on_hub[1]} --local-dir {folder}` below a storage root, and write file://{folder}"
            )
        check_folder(uri)
        return uri

    @field_validator("master_dtype")
    @classmethod
    def _master_can_be_unscaled(cls, master: Dtype) -> Dtype:
        if master == "fp16":
            raise ValueError("fp16 holds neither small updates nor scaled gradients; choose fp32 or bf16")
        return master

    @field_validator("attn_implementation")
    @classmethod
    def _flash_has_half_precision(cls, attention: str, info: ValidationInfo) -> str:
        if attention.startswith("flash") and info.data.get("dtype") == "fp32":
            raise ValueError(f"{attention} computes in bf16 or fp16, and dtype is fp32; choose sdpa, or another dtype")
        return attention
