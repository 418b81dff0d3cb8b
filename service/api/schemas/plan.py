"""Response models of a plan."""

from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue


class MeshOut(BaseModel):
    """The device mesh."""

    ddp: int
    fsdp: int
    sp: int
    tp: int
    ep: int
    efsdp: int
    shape: tuple[int, ...]
    names: tuple[str, ...]


class ReductionTreeOut(BaseModel):
    """The order of sums of a job with `reproducible: any_size`."""

    max_shards: int = Field(description="largest number of data-parallel ranks in a shard group")
    max_replicas: int = Field(description="largest number of shard groups")
    micro_batches: int = Field(description="micro-batches per optimizer step, which are the leaves of the tree")
    allowed_workers: list[int] = Field(description="numbers of workers that give the same bits")


class MemoryTermOut(BaseModel):
    """One part of a worker's memory."""

    name: str
    bytes: int
    formula: str
    place: Literal["device", "host"]


class MemoryOut(BaseModel):
    """Estimated memory per worker at the peak of a step."""

    total_bytes: int = Field(description="bytes per worker on the device that computes")
    host_bytes: int = Field(description="bytes per worker in host memory, if the model computes on a GPU")
    terms: list[MemoryTermOut]


class PreviewOut(BaseModel):
    """Preview of data preparation: counts over the first rows of a source."""

    source: str
    rows: int = Field(description="rows read")
    bad_rows: int
    long_rows: int = Field(description="rows of more than sequence_length tokens")
    untrained_rows: int = Field(description="rows without a trained token; they are dropped")
    on_long_rows: str = Field(description="what happens to long_rows")
    begins_with_bos: bool | None = Field(
        default=None, description="whether documents begin with the tokenizer's BOS token; null for rows of token ids"
    )


class SpellingOut(BaseModel):
    """A value that the spec writes in another way than the schema."""

    field: str = Field(description="the field as written")
    written: JsonValue = Field(description="the value as written")
    became: dict[str, JsonValue] = Field(description="the fields that it became, with their values")


class RangeOut(BaseModel):
    """The ends of an interval."""

    least: float
    most: float


class DeviceOut(BaseModel):
    """A GPU: rates per GPU, without sparsity, of the vendor's data sheet."""

    name: str
    title: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops: float | None = Field(description="dense FLOP/s in the compute dtype; null if it has no kernels for it")
    link_bytes_per_second: float = Field(description="to the other GPUs of its host, in one direction")
    network_bytes_per_second: float | None = Field(description="to other hosts, for each GPU; null if unknown")
    gpus_per_host: int
    source: str


class StepPartOut(BaseModel):
    """One kind of work in an optimizer step."""

    name: str
    seconds: RangeOut


class SuggestionOut(BaseModel):
    """Overrides of the spec with which the plan fits the GPU, at the same global batch."""

    change: str
    overrides: dict[str, dict[str, Any]]
    workers: int
    needed_bytes: int
    tokens_per_second: RangeOut | None
    changes_results: bool = Field(description="true if the run's numbers change by more than the order of sums")


class UnitOut(BaseModel):
    """FSDP units of one class and size."""

    module: str = Field(description="class of the module")
    count: int
    parameters: int = Field(description="parameters of one unit, without those of units inside of it")
    bytes: int = Field(description="bytes of one unit's gathered parameters")
    dtype: str = Field(description="dtype in which the unit computes")


class Float8Out(BaseModel):
    """Linear modules that compute in float8."""

    scaling: Literal["rowwise", "tensorwise"]
    linears: int = Field(description="number of them")
    left_out: list[str] = Field(description="names of those that keep their dtype: a size is no multiple of 16")


class ChoicesOut(BaseModel):
    """Choices for the run, as its event `model_built` says it, too; workers decide about `auto`."""

    units: list[UnitOut] | None = Field(
        description="FSDP units; empty if each worker of an inference job holds the whole model; null if they are "
        "unknown"
    )
    tree: str | None = Field(description="modules as print(model) shows them; the names of units begin with FSDP")
    dtypes: dict[str, str]
    attention: str | None
    loss_chunk_tokens: int | None = Field(description="tokens of a chunk of logits; null: all at once")
    checkpointing: str
    optimizer_groups: list[dict[str, str | float | int]]
    cores: float = Field(description="CPUs of a worker")
    backend: str
    float8: Float8Out | None = Field(default=None, description="null without strategy.float8")


class OutlookOut(BaseModel):
    """The plan on a GPU: whether it fits, and a forecast of its throughput."""

    device: DeviceOut
    verdict: Literal["fits", "tight", "does_not_fit"] = Field(
        description="tight: the certain terms fit, and the whole estimate with a margin does not"
    )
    needed_bytes: int = Field(description="estimated memory at the peak of a step, with that of CUDA itself")
    step_seconds: RangeOut | None
    tokens_per_second: RangeOut | None = Field(description="tokens of full rows over all workers")
    parts: list[StepPartOut] = Field(description="seconds of a step by kind of work, some at the same time")
    assumptions: list[str]
    no_throughput: str | None = Field(description="why throughput is not estimated; null if it is")
    largest_micro_batch: int | None = Field(
        description="largest per_device_train_batch_size that fits at the same global batch; null if none does"
    )
    suggestions: list[SuggestionOut] | None = Field(description="cheapest first; null unless they were asked for")


class PlanOut(BaseModel):
    """The plan of a job spec: mesh, batch, steps and memory."""

    name: str
    world: int
    sizes: list[int] = Field(
        description="possible numbers of workers of an elastic job; the other fields are for the largest"
    )
    mesh: MeshOut
    reduction_tree: ReductionTreeOut | None = Field(description="null unless reproducible is any_size")
    nodes: list[list[int]] | None = Field(
        description="ranks per node of an empty cluster; null if nodes are unknown or have no capacity"
    )
    data_parallel_size: int
    global_batch_size: int
    micro_batch_size: int
    micro_batch_by: Literal["spec", "memory", "workers"] = Field(
        description="source of micro_batch_size: the spec; with per_device_train_batch_size auto, the memory of a "
        "worker, or if that is not known 1, and the workers choose"
    )
    gradient_accumulation_steps: int
    tokens_per_step: int | None = Field(description="null for own columns, whose tokens only own code knows")
    steps: int | None = Field(description="optimizer steps; null if only known after data preparation")
    ends_by: Literal["max_steps", "num_train_epochs", "max_tokens"] | None = Field(
        description="setting that ends the run, of max_steps and num_train_epochs the earlier one; null if only known "
        "after data preparation"
    )
    parameters: int
    trained_parameters: int = Field(description="parameters that are not frozen")
    active_parameters: int | None = Field(
        description="parameters of a mixture of experts that a token uses; null for dense models"
    )
    flops_per_row: int | None = Field(
        description="FLOPs to train on a row with own code, an estimate without recomputation; null if unknown, and "
        "for other models"
    )
    memory: MemoryOut
    checkpoint_bytes: int = Field(description="estimated size of one checkpoint; keep_last of them are kept")
    choices: ChoicesOut
    outlook: OutlookOut | None = Field(description="the plan on a GPU; null if none is named or known")
    preview: list[PreviewOut] = Field(description="counts of the first rows of each source")
    spellings: list[SpellingOut] = Field(description="values written in another way, with their canonical form")
    warnings: list[str]
