"""`infer.generation:` how `output: generate` chooses tokens, and where it ends."""

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from train_loop.spec.base import SpecModel

_OF_SAMPLING = ("top_k", "top_p", "seed")


class GenerationSpec(SpecModel):
    """The choice of tokens after each row, and its end."""

    max_new_tokens: int = Field(default=128, ge=1, description="tokens that a row gets at most, after its own")
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="0: the most probable token (greedy); above 0: a token is drawn from softmax(logits / temperature)",
    )
    top_k: int = Field(default=0, ge=0, description="draw from the k most probable tokens; 0: from all")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="draw from the most probable tokens that together have this probability; 1: from all",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of drawn tokens, which depend on it, the row's id and the position"
    )
    stop: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = Field(
        default=(),
        strict=False,
        description="texts before which the text of a row ends; they may contain special tokens",
    )
    stop_tokens: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        strict=False,
        description="tokens after which a row ends; null: EOS of generation_config.json, or else of the tokenizer, or "
        "of the model's config; []: none",
    )
    logprobs: bool = Field(default=False, description="also store the log probability of each generated token")

    @model_validator(mode="after")
    def _has_effect(self) -> "GenerationSpec":
        if self.temperature == 0:
            for name in _OF_SAMPLING:
                value, default = getattr(self, name), type(self).model_fields[name].default
                if value != default:
                    raise ValueError(
                        f"{name}={value} has no effect at temperature=0; set temperature, or remove {name}"
                    )
        return self
