"""`strategy:` the distribution of the model over workers: ROLL's strategy_config with ulysses_size."""

from math import lcm
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, StringConstraints, field_validator, model_validator

from train_loop.spec.base import SpecModel, is_default
from train_loop.spec.model import Dtype
from train_loop.spec.names.spellings import NODE, nearest_value


class WrapPolicySpec(SpecModel):
    """The modules that become FSDP units; by default the model's own decoder layers."""

    transformer_layer_cls_to_wrap: tuple[str, ...] = Field(
        default=(),
        description="class names of the modules; empty: the model's own list of modules that must not be split",
    )
    min_num_params: int | None = Field(
        default=None,
        ge=1,
        description="make units of modules by size instead of by class: those with at least so many parameters that no "
        "unit inside of them has",
    )
    wrap_embeddings: bool | None = Field(
        default=None,
        description="make the input embeddings an FSDP unit; null: if they are larger than a layer, and not tied",
    )
    wrap_lm_output: bool | None = Field(
        default=None,
        description="make the output layer an FSDP unit; null: if it is larger than a layer, and not tied",
    )
    moe_experts: tuple[str, ...] = Field(
        default=(),
        description="class names of experts, as Qwen3MoeExperts or ROLL's Qwen3MoeMLP: the experts of each "
        "layer become a separate FSDP unit inside it",
    )

    @model_validator(mode="after")
    def _one_way_to_wrap(self) -> "WrapPolicySpec":
        if self.min_num_params is not None and self.transformer_layer_cls_to_wrap:
            raise ValueError(
                f"min_num_params={self.min_num_params} selects units by size and transformer_layer_cls_to_wrap="
                f"{', '.join(self.transformer_layer_cls_to_wrap)} by class; remove one"
            )
        if self.min_num_params is not None and self.moe_experts:
            raise ValueError(
                f"min_num_params={self.min_num_params} selects units by size and moe_experts="
                f"{', '.join(self.moe_experts)} by class; remove one"
            )
        return self


SaveMode = Literal["sync", "thread", "process"]
ModulePattern = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class StrategySpec(SpecModel):
    """The settings of FSDP2, Ulysses and tensor parallelism; `train_loop.plan.mesh` has the mesh rules."""

    fsdp_size: int | Literal["node"] = Field(
        default=0,
        description="workers that share a shard group; <= 1 or >= workers: all of them; else HSDP with a mesh of "
        "(workers / n, n); node: as many as a node holds, so that nodes are replicas; the service stores the number",
    )
    sharding_strategy: Literal["FULL_SHARD", "NO_SHARD"] = Field(
        default="FULL_SHARD",
        description="FULL_SHARD: parameters, gradients and optimizer states are sharded; NO_SHARD: each worker "
        "holds all of them, as with DDP; SHARD_GRAD_OP, HYBRID_SHARD, _HYBRID_SHARD_ZERO2 and torch's numbers become "
        "FULL_SHARD with reshard_after_forward and fsdp_size",
    )
    ulysses_size: int = Field(
        default=1, ge=1, description="workers that share each sequence (Ulysses sequence parallelism)"
    )
    tp_size: int = Field(
        default=1,
        ge=1,
        description="workers that share each layer (tensor parallelism), by the plan of the model's family; fsdp_size "
        "and ulysses_size then count groups of that many workers",
    )
    sequence_parallel: bool = Field(
        default=False,
        exclude_if=is_default(False),
        description="with tp_size: norms and the residual stream have 1 / tp_size of the tokens of a sequence, which "
        "attention and MLPs gather; saves memory (Megatron-LM's sequence parallelism)",
    )
    ep_size: int = Field(
        default=1,
        ge=1,
        description="workers that share the experts of each layer (expert parallelism): each has whole experts, and "
        "tokens go to the worker of their experts; divides fsdp_size x tp_size",
    )
    efsdp_size: int = Field(
        default=0,
        ge=0,
        description="workers that shard each expert; 0: the only number that fits, fsdp_size x tp_size / ep_size",
    )
    param_dtype: Dtype = Field(
        default="bf16", description="compute dtype of FSDP; equals model.dtype if only one of the two is set"
    )
    reduce_dtype: Dtype = Field(default="fp32", description="dtype of gradient reduction")
    output_dtype: Dtype | None = Field(
        default=None,
        description="dtype of the model's output; null: the compute dtype; the loss is always computed in fp32",
    )
    cast_forward_inputs: bool = Field(
        default=True,
        exclude_if=is_default(True),
        description="cast the floating-point inputs of each FSDP unit to the compute dtype; false: they must have it",
    )
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        default="highest",
        exclude_if=is_default("highest"),
        description="precision of fp32 matrix products, as torch.set_float32_matmul_precision: high: TF32; medium: "
        "bf16; bf16 and fp16 computation is not affected",
    )
    gradient_sync: Literal["every", "last"] = Field(
        default="every",
        exclude_if=is_default("every"),
        description="micro-batches whose gradients ranks exchange: every: each, so that only shards are kept; last: "
        "whole gradients are summed on each worker and exchanged once a step, which saves traffic and takes memory",
    )
    norm_dtype: Literal["fp32"] | None = Field(
        default=None, description="fp32: norms keep fp32 weights and compute in fp32"
    )
    float8: Literal["rowwise", "tensorwise"] | None = Field(
        default=None,
        exclude_if=is_default(None),
        description="compute the linear layers inside of decoder layers in float8, by torchao, on GPUs of compute "
        "capability 8.9 or later: tensorwise: one scale for a tensor, and weights are gathered in float8; rowwise: one "
        "for each row, which is more exact, and weights are gathered in the compute dtype; CPUs emulate it slowly",
    )
    precision: dict[ModulePattern, Dtype] = Field(
        default={},
        exclude_if=is_default({}),
        max_length=64,
        description="dtype in which modules compute, by the path of a module or a glob (* for any characters), with "
        "all modules inside; the last match wins; each such module is an FSDP unit",
    )
    reshard_after_forward: bool | int | None = Field(
        default=None,
        description="free gathered parameters after the forward pass; null: all units except the root; an integer: "
        "reshard to groups of that many ranks",
    )
    offload_policy: bool | Literal["optimizer"] = Field(
        default=False,
        description="true: keep parameters, gradients and optimizer states in host memory; optimizer: only optimizer "
        "states, which are copied to the GPU for the update",
    )
    pin_memory: bool = Field(
        default=True,
        exclude_if=is_default(True),
        description="pin the host memory of offload_policy and of model.gradient_checkpointing: offload, so that GPUs "
        "copy it faster; false: if hosts cannot lock so much memory",
    )
    wrap_policy: WrapPolicySpec = Field(default=WrapPolicySpec(), description="modules that become FSDP units")
    ignored_params: tuple[ModulePattern, ...] = Field(
        default=(),
        exclude_if=is_default(()),
        max_length=64,
        description="parameters that are not sharded, by name, path of a module or glob: each worker holds them whole, "
        "and their gradients are summed over all workers",
    )
    apply_expert_patch: bool = Field(
        default=False,
        description="ROLL's patch for experts without tokens; it changes nothing, because all experts have gradients "
        "without it",
    )
    apply_tiled_mlp: bool = Field(
        default=False,
        description="compute each MLP in tiles of tokens, which saves memory; in a mixture of experts the dense MLPs, "
        "which are those of layers without experts and of shared experts",
    )
    tiled_num_shards: int = Field(default=4, ge=1, description="number of tiles of apply_tiled_mlp")
    async_save_ckpt: bool | SaveMode = Field(
        default=True,
        description="thread (true): a thread writes checkpoints during training; process: a separate process does; "
        "sync (false): training waits",
    )
    forward_prefetch: int = Field(
        default=1, ge=1, description="layers to gather ahead in the forward pass; 1: FSDP's own order"
    )
    backward_prefetch: int = Field(
        default=1, ge=1, description="layers to gather ahead in the backward pass; 1: FSDP's own order"
    )

    @field_validator("fsdp_size", mode="before")
    @classmethod
    def _is_a_size(cls, size: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        if size != NODE and (isinstance(size, bool) or not isinstance(size, int)):
            near = nearest_value(size, [NODE])
            meant = f"; did you mean {near}?" if near else ""
            raise ValueError(f"invalid fsdp_size={size!s:.64}; expected a number of workers, or node{meant}")
        return size

    @field_validator("async_save_ckpt", mode="before")
    @classmethod
    def _is_a_way_to_save(cls, mode: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        if not isinstance(mode, bool) and mode not in get_args(SaveMode):
            raise ValueError(f"invalid async_save_ckpt={mode}; expected true, false, thread, process or sync")
        return mode

    @field_validator("offload_policy", mode="before")
    @classmethod
    def _is_a_way_to_offload(cls, policy: Any) -> Any:
        """Raise a single error instead of pydantic's error for each type of the field."""
        if not isinstance(policy, bool) and policy != "optimizer":
            raise ValueError(f"invalid offload_policy={policy}; expected true, false or optimizer")
        return policy

    @property
    def shards(self) -> int:
        """The fsdp_size as a number, once `node` has been resolved for the nodes of the run."""
        assert isinstance(self.fsdp_size, int), "the service or the command resolves node before the size is read"
        return self.fsdp_size

    @property
    def shard_group(self) -> int:
        """The number of workers of a shard group, which a node should hold whole; 1 if all workers are one group."""
        sharded = self.sharding_strategy != "NO_SHARD" and isinstance(self.fsdp_size, int) and self.fsdp_size > 1
        return self.shards * self.tp_size if sharded else 1

    @property
    def whole_group(self) -> int:
        """The number of workers that a node should hold whole: a shard group, or groups that share experts; else 1."""
        if self.shard_group > 1 or self.ep_size == 1:
            return self.shard_group
        return lcm(self.ep_size, self.peers)

    def gathering(self, world: int) -> int:
        """Return the number of consecutive workers that gather each layer from one another; 1 if nothing is sharded."""
        whole = world // self.tp_size
        if self.sharding_strategy == "NO_SHARD" or whole == 1:
            return 1
        return self.shards * self.tp_size if 1 < self.shards < whole else whole * self.tp_size

    @property
    def peers(self) -> int:
        """The number of workers with the same samples, which belong on one node."""
        return self.ulysses_size * self.tp_size

    @property
    def token_parts(self) -> int:
        """The number of parts of the tokens of a sequence between projections."""
        return self.tp_size if self.sequence_parallel else 1

    @property
    def name_of_peers(self) -> str:
        """The setting, or the product of settings, with the number of peers."""
        if self.tp_size == 1:
            return "ulysses_size"
        return "tp_size" if self.ulysses_size == 1 else "tp_size x ulysses_size"

    @property
    def over_all_workers(self) -> "StrategySpec":
        """The same strategy with one FSDP group of all workers, which share neither sequences, layers nor experts."""
        alone = {"fsdp_size": 0, "ulysses_size": 1, "tp_size": 1, "ep_size": 1, "efsdp_size": 0}
        return self.model_copy(update=alone | {"sequence_parallel": False})

    @property
    def with_any_ends(self) -> "StrategySpec":
        """The same strategy, whether embeddings and head are units or not, which changes no bits."""
        either = {"wrap_embeddings": None, "wrap_lm_output": None}
        return self.model_copy(update={"wrap_policy": self.wrap_policy.model_copy(update=either)})

    @property
    def save_mode(self) -> SaveMode:
        """The mode in which checkpoints are written."""
        named: dict[bool, SaveMode] = {False: "sync", True: "thread"}
        return named[self.async_save_ckpt] if isinstance(self.async_save_ckpt, bool) else self.async_save_ckpt

    @model_validator(mode="after")
    def _one_way_to_shard(self) -> "StrategySpec":
        if self.sharding_strategy == "NO_SHARD" and (self.fsdp_size == NODE or self.shards > 1):
            raise ValueError(
                f"sharding_strategy=NO_SHARD shards nothing, but fsdp_size={self.fsdp_size} requests shards; remove one"
            )
        return self

    @model_validator(mode="after")
    def _whole_gradients_are_exact(self) -> "StrategySpec":
        if self.gradient_sync == "last" and self.reduce_dtype != "fp32":
            raise ValueError(
                f"gradient_sync=last sums micro-batches in reduce_dtype, and {self.reduce_dtype} would lose small "
                "gradients; choose reduce_dtype: fp32, or gradient_sync: every"
            )
        return self

    @model_validator(mode="after")
    def _whole_parameters_stay_whole(self) -> "StrategySpec":
        reshard = self.reshard_after_forward
        if self.ignored_params and isinstance(reshard, int) and not isinstance(reshard, bool):
            raise ValueError(
                f"reshard_after_forward={reshard} shards parameters again, but ignored_params are never sharded; "
                "choose reshard_after_forward true, false or null, or remove ignored_params"
            )
        return self

    @model_validator(mode="after")
    def _states_are_split_among_ranks_that_share_layers(self) -> "StrategySpec":
        if self.sequence_parallel and self.tp_size == 1:
            raise ValueError(
                "sequence_parallel splits tokens among the workers that share layers, and tp_size=1 shares none; set "
                "tp_size, or remove sequence_parallel; ulysses_size splits sequences without tp_size"
            )
        return self

    @model_validator(mode="after")
    def _tiles_are_gathered_once(self) -> "StrategySpec":
        least = self.wrap_policy.min_num_params
        if self.apply_tiled_mlp and least is not None:
            raise ValueError(
                f"apply_tiled_mlp gathers each MLP once for all tiles, but min_num_params={least} may make units of "
                "its parts; remove one"
            )
        return self
