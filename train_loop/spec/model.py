"""`model:` what is trained."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel, only

Dtype = Literal["bf16", "fp16", "fp32"]


class LoraSpec(SpecModel):
    """Low-rank adapters on the named modules."""

    r: int = Field(gt=0)
    alpha: float = Field(gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: tuple[str, ...]


class ModelSpec(SpecModel):
    """A Hugging Face causal language model: a folder of weights at `path`, or random weights from a `config`."""

    path: str | None = Field(default=None, description="HF model folder at a storage URI")
    config: dict[str, Any] | None = Field(default=None, description="HF config; the weights are random")
    tokenizer: str | None = Field(
        default=None,
        description="URI of an HF tokenizer folder; without one, a model built from `config` gets a byte-level BPE "
        "of config.vocab_size tokens trained on data.train",
    )
    dtype: Annotated[Dtype, only("bf16", "fp32")] = Field(default="bf16", description="compute dtype")
    master_dtype: Annotated[Dtype, only("fp32")] = "fp32"
    attn_implementation: Annotated[
        Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3"], only("auto", "sdpa")
    ] = "auto"
    gradient_checkpointing: Annotated[Literal["none", "full", "offload"], only("none", "full")] = "full"
    freeze_module_prefix: tuple[str, ...] = Field(
        default=(), description="modules, by the beginning of their names, whose parameters are not trained"
    )
    lora: Annotated[LoraSpec | None, only(None)] = None
    compile: Annotated[bool, only(False)] = False

    @model_validator(mode="after")
    def _exactly_one_source(self) -> "ModelSpec":
        if self.path is not None and self.config is not None:
            raise ValueError("exactly one of model.path and model.config is needed, and both are given; remove one")
        if self.path is None and self.config is None:
            raise ValueError("exactly one of model.path and model.config is needed, and neither is given; add one")
        if self.path is not None:
            raise ValueError("model.path is not supported yet; use model.config (random weights)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config needs a model_type, for example model_type: qwen3")
        return self
