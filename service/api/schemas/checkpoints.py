"""Request and response models of checkpoints."""

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from service.api.schemas.common import Time
from train_loop.spec import DTYPES

ExportState = Literal["running", "done", "failed"]
ExportForm = Literal["adapter", "merged", "dequantized"]
"""As in train_loop.run_dir, which needs libraries that the client does not have."""


class CheckpointOut(BaseModel):
    """A committed checkpoint."""

    step: int
    tokens: int
    bytes: int
    time: Time
    attempt: int
    world: int
    mesh: dict[str, int]
    metrics: dict[str, float] = Field(description="metrics of its step")
    pinned: bool


class Checkpoints(BaseModel):
    """Committed checkpoints, oldest first."""

    data: list[CheckpointOut]


class Verified(BaseModel):
    """The result of a checkpoint's verification."""

    step: int
    ok: bool
    faults: list[str]


class TensorDigestOut(BaseModel):
    """A tensor's dtype, shape and digest."""

    dtype: str
    shape: list[int]
    sha256: str = Field(description="SHA-256 over dtype, shape and the tensor's bytes in row-major order")


class DigestsOut(BaseModel):
    """Digests of a checkpoint's tensors. They do not depend on the number of ranks that wrote it."""

    step: int
    sha256: str = Field(description="SHA-256 over the names and digests of all tensors")
    tensors: dict[str, TensorDigestOut] = Field(description="weights, optimizer states and averages by name")


class ExportIn(BaseModel):
    """Options of an export."""

    model_config = {"extra": "forbid"}

    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(
        default=None, description="default: the job's model.dtype, and fp32 with form adapter"
    )
    weights: Literal["model", "ema"] = Field(default="model", description="ema: the average of the weights")
    form: ExportForm | None = Field(
        default=None,
        description="of a job with model.lora; adapter (default): a folder for peft; merged: the model with the "
        "adapters added to its weights; dequantized: to its restored weights, of a job with model.quantize_base",
    )

    include: Literal["optimizer"] | None = Field(
        default=None,
        description="optimizer: also the optimizer state and the position of the run; another job starts from the "
        "folder as model.path and training.optimizer_state; the default of dtype is then model.master_dtype",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_spelled(cls, given: object) -> object:
        return DTYPES.get(given, given) if isinstance(given, str) else given


class ExportOut(BaseModel):
    """State and progress of an export."""

    step: int
    dtype: str
    weights: str
    form: ExportForm | None = Field(description="of a job with model.lora: adapter, merged or dequantized")
    include: Literal["optimizer"] | None = Field(description="contents of the folder besides the model")
    state: ExportState
    progress: float = Field(description="share of the weights written so far")
    reason: str | None
    path: str = Field(description="path of the Hugging Face folder when the state is done")
    difference: float | None = Field(
        description="largest difference of a merged model's outputs from those with adapters, if it was measured"
    )
