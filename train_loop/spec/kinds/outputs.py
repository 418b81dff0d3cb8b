"""`infer:` the outputs of an inference job."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel, is_default, only
from train_loop.spec.kinds.generation import GenerationSpec

_ROLLS = "infer_batch_size"
"""Name of batch_size in ROLL."""


class InferSpec(SpecModel):
    """The outputs of a job of `kind: infer`: one row of results for each row of the data."""

    output: Literal["logprobs", "perplexity", "embeddings", "generate"] = Field(
        default="logprobs",
        description="logprobs: the log probability of each token after the first; perplexity: of each row; "
        "embeddings: a vector for each row, by model.head.embedding; generate: tokens after each row",
    )
    generation: GenerationSpec = Field(
        default=GenerationSpec(),
        description="choice and end of tokens, for output: generate",
        exclude_if=is_default(GenerationSpec()),
    )
    batch_size: int = Field(
        default=4, ge=1, description="rows per data-parallel rank and call of the model; results do not depend on it"
    )
    rows_per_shard: int = Field(
        default=1024,
        ge=1,
        description="rows in each Parquet file of results, which is committed as a whole; a restart repeats at most "
        "the rows of one",
    )
    path: Annotated[str | None, only(None)] = Field(
        default=None, description="folder of the results; null: results/ in the run directory"
    )

    @property
    def new_tokens(self) -> int:
        """The tokens that a row may get beyond its own."""
        return self.generation.max_new_tokens if self.output == "generate" else 0

    @model_validator(mode="after")
    def _generates(self) -> "InferSpec":
        if self.output != "generate" and self.generation != GenerationSpec():
            raise ValueError(f"generation has no effect on output: {self.output}; set output: generate, or remove it")
        return self

    @model_validator(mode="before")
    @classmethod
    def _batch_size_has_a_name_of_roll(cls, values: Any) -> Any:
        if not isinstance(values, dict) or _ROLLS not in values:
            return values
        if "batch_size" in values:
            raise ValueError(f"batch_size and {_ROLLS} are the same field; remove one of the two")
        return {"batch_size" if name == _ROLLS else name: value for name, value in values.items()}
