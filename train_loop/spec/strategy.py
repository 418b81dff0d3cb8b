"""`strategy:` how the model is spread over workers: ROLL's strategy_config with ulysses_size."""

from typing import Annotated

from pydantic import Field

from train_loop.spec.base import SpecModel, only
from train_loop.spec.model import Dtype


class WrapPolicySpec(SpecModel):
    """Which modules become FSDP units of their own; by default the model's own decoder layers."""

    transformer_layer_cls_to_wrap: Annotated[tuple[str, ...], only(())] = ()
    wrap_embeddings: Annotated[bool, only(False)] = False
    wrap_lm_output: Annotated[bool, only(False)] = False
    moe_experts: Annotated[tuple[str, ...], only(())] = ()


class StrategySpec(SpecModel):
    """FSDP2 and Ulysses; the mesh rules are those of `train_loop.plan.mesh`."""

    fsdp_size: int = Field(default=0, description="<= 1 or >= world: one fsdp dimension; else HSDP (world/n, n)")
    ulysses_size: int = Field(default=1, ge=1)
    param_dtype: Annotated[Dtype, only("bf16", "fp32")] = Field(
        default="bf16", description="FSDP's compute dtype; follows model.dtype where only one of the two is set"
    )
    reduce_dtype: Annotated[Dtype, only("bf16", "fp32")] = "fp32"
    reshard_after_forward: Annotated[bool | int | None, only(None, True, False)] = None
    offload_policy: Annotated[bool, only(False)] = False
    wrap_policy: WrapPolicySpec = WrapPolicySpec()
    apply_expert_patch: Annotated[bool, only(False)] = False
    apply_tiled_mlp: Annotated[bool, only(False)] = False
    tiled_num_shards: Annotated[int, only(4)] = 4
    async_save_ckpt: bool = True
    forward_prefetch: Annotated[int, only(1)] = 1
    backward_prefetch: Annotated[int, only(1)] = 1
