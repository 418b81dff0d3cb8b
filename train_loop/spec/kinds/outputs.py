"""`infer:` the outputs of an inference job."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from train_loop.spec.base import SpecModel, only

_ROLLS = "infer_batch_size"
"""Name of batch_size in ROLL."""


class InferSpec(SpecModel):
    """The outputs of a job of `kind: infer`: one row of results for each row of the data."""

    output: Annotated[
        Literal["logprobs", "perplexity", "embeddings", "generate"], only("logprobs", "perplexity", "embeddings")
    ] = Field(
        default="logprobs",
        description="logprobs: the log probability of each token after the first; perplexity: of each row; "
        "embeddings: a vector for each row, by model.head.embedding",
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

    @model_validator(mode="before")
    @classmethod
    def _batch_size_has_a_name_of_roll(cls, values: Any) -> Any:
        if not isinstance(values, dict) or _ROLLS not in values:
            return values
        if "batch_size" in values:
            raise ValueError(f"batch_size and {_ROLLS} are the same field; remove one of the two")
        return {"batch_size" if name == _ROLLS else name: value for name, value in values.items()}
