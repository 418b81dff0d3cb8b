"""`strategy:` the distribution of the model over workers: ROLL's strategy_config with ulysses_size."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from train_loop.spec.base import SpecModel, only
from train_loop.spec.model import Dtype


class WrapPolicySpec(SpecModel):
    """The modules that become FSDP units; by default the model's own decoder layers."""

    transformer_layer_cls_to_wrap: tuple[str, ...] = Field(
        default=(), description="class names; empty: the classes that the model itself declares as unsplittable"
    )
    wrap_embeddings: bool = False
    wrap_lm_output: bool = False
    moe_experts: Annotated[tuple[str, ...], only(())] = ()


SaveMode = Literal["sync", "thread", "process"]


class StrategySpec(SpecModel):
    """The settings of FSDP2 and Ulysses; `train_loop.plan.mesh` has the mesh rules."""

    fsdp_size: int = Field(default=0, description="<= 1 or >= world: one fsdp dimension; else HSDP (world/n, n)")
    sharding_strategy: Literal["FULL_SHARD", "NO_SHARD"] = Field(
        default="FULL_SHARD", description="NO_SHARD: every worker holds all parameters, as with DDP"
    )
    ulysses_size: int = Field(default=1, ge=1)
    param_dtype: Dtype = Field(
        default="bf16", description="FSDP's compute dtype; follows model.dtype if only one of the two is set"
    )
    reduce_dtype: Dtype = "fp32"
    output_dtype: Literal["fp32"] | None = Field(
        default=None, description="dtype of the model's output; the loss itself is always computed in fp32"
    )
    norm_dtype: Literal["fp32"] | None = Field(
        default=None, description="fp32: norms keep fp32 weights and compute in fp32"
    )
    reshard_after_forward: bool | int | None = Field(
        default=None, description="null: all but the root; an integer: to groups of that many ranks"
    )
    offload_policy: bool = Field(default=False, description="parameters, gradients and optimizer live on the CPU")
    wrap_policy: WrapPolicySpec = WrapPolicySpec()
    apply_expert_patch: Annotated[bool, only(False)] = False
    apply_tiled_mlp: bool = Field(default=False, description="each MLP processes its tokens in tiles")
    tiled_num_shards: int = Field(default=4, ge=1)
    async_save_ckpt: bool | SaveMode = Field(
        default=True,
        description="thread (true): a thread writes files during training; process: a separate process writes them; "
        "sync (false): training waits for them",
    )
    forward_prefetch: int = Field(default=1, ge=1, description="layers gathered ahead; 1: by FSDP's own order")
    backward_prefetch: int = Field(default=1, ge=1)

    @field_validator("async_save_ckpt", mode="before")
    @classmethod
    def _is_a_way_to_save(cls, mode: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        if not isinstance(mode, bool) and mode not in get_args(SaveMode):
            raise ValueError(f"invalid async_save_ckpt={mode}; expected true, false, thread, process or sync")
        return mode

    @property
    def save_mode(self) -> SaveMode:
        """The mode in which checkpoints are written."""
        named: dict[bool, SaveMode] = {False: "sync", True: "thread"}
        return named[self.async_save_ckpt] if isinstance(self.async_save_ckpt, bool) else self.async_save_ckpt

    @model_validator(mode="after")
    def _one_way_to_shard(self) -> "StrategySpec":
        if self.sharding_strategy == "NO_SHARD" and self.fsdp_size > 1:
            raise ValueError(
                f"sharding_strategy=NO_SHARD shards nothing, but fsdp_size={self.fsdp_size} requests shards; remove one"
            )
        return self
