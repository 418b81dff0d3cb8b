"""Expert parallelism by transformers' own plans: each rank has whole experts of a layer, and receives their tokens."""

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy, Experts
from train_loop.model.families.causal.build import config_of
from train_loop.model.families.causal.config import SOURCE
from train_loop.plan import divisors, one_of
from train_loop.spec import JobSpec

try:
    from transformers.distributed.expert_parallel import (
        AllToAllEP,
        EPImplementationInterface,
        apply_expert_parallelism,
    )
except ImportError:  # an older version, which trains everything else
    AllToAllEP = object
    apply_expert_parallelism = None

_KINDS = """
    afmoe aria_text axk1 bailing_hybrid cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo
    flint glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe
    hy_v3 jamba kimi_linear kolibri1 laguna lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
    mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next solar_open zaya
"""
PROVEN = frozenset(_KINDS.split())
_ADAPTED = {"deepseek_v3", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}
"""Mixtures of which gradients of adapters outside of experts have been compared."""
"""Families whose loss and gradients `tests/families/test_expert_parallel.py` compares with those of one rank."""
_DISPATCH, _WHOLE_EXPERTS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers for a module whose tokens are exchanged, and for a weight with a row for each expert."""
_EXCHANGE = "trainshed"
"""Name of the exchange in transformers' registry."""


class Exchange(AllToAllEP):  # type: ignore[misc]
    """transformers' exchange of tokens between the ranks that share experts, with the number of its calls."""

    def __init__(self, experts: nn.Module, *meshes: DeviceMesh) -> None:
        super().__init__(experts, *meshes)
        self.calls = 0
        experts.exchange = self

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute the experts of all tokens, [T, H], [T, K], [T, K] → [T, H]."""
        self.calls += 1
        out: Tensor = super().__call__(*inputs)
        return out


def check_expert_plan(model: Any, experts: Experts, spec: JobSpec) -> None:
    """Raise ModelError if ranks cannot share the experts of a model."""
    size, kind = spec.strategy.ep_size, config_of(model).model_type
    if size == 1:
        return
    if apply_expert_parallelism is None:
        raise ModelError(f"ep_size={size} needs transformers 5.21 or newer, and this is {SOURCE}; install it")
    if experts.number % size:
        fits = divisors(math.gcd(experts.number, spec.scaling.bounds[1]))
        raise ModelError(
            f"ep_size={size} does not divide the {experts.number} experts of each layer of {type(model).__name__}; "
            f"choose {one_of(fits)}, or another number of workers"
        )
    if missing := _without_style(model, experts):
        raise ModelError(
            f"ep_size={size} needs a plan of how ranks share experts, and that of {SOURCE} for model_type={kind} does "
            f"not name {missing}; choose ep_size: 1, or another mixture, for example qwen3_moe"
        )
    if kind not in PROVEN:
        raise ModelError(
            f"ep_size={size} is not proven for model_type={kind}; see the proven families on the page on mixtures of "
            "experts; choose ep_size: 1, or another mixture, for example qwen3_moe"
        )
    if spec.model.lora is not None and kind not in _ADAPTED:
        raise ModelError(
            f"ep_size={size} is not proven with adapters for model_type={kind}; those proven are "
            f"{one_of(sorted(_ADAPTED))}; choose ep_size: 1"
        )


def _without_style(model: Any, experts: Experts) -> str | None:
    """Return a module or parameter of experts that the plan does not split; None if it splits all."""
    plan = _expanded(model)
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    wanted = {names[module]: _DISPATCH for module in experts.modules}
    for module in experts.modules:
        wanted |= {f"{names[module]}.{leaf}": _WHOLE_EXPERTS for leaf, _ in module.named_parameters()}
    return next((name for name, style in wanted.items() if plan.get(name) != style), None)


def share_experts(anatomy: Anatomy, mesh: DeviceMesh, tokens: DeviceMesh) -> None:
    """Split the experts of a model on the meta device over the ranks of a mesh, in place.

    The ranks of `tokens` have the same tokens, of which each sends a part. From then on each call of experts is checked
    to exchange tokens.
    """
    model, experts = anatomy.model, anatomy.experts
    assert experts is not None, "the spec was checked"
    EPImplementationInterface.register(_EXCHANGE, Exchange)
    names, plan = {module: name for name, module in model.named_modules()}, _expanded(model)
    own = tuple(names[module] for module in experts.modules)
    chosen = {name: style for name, style in plan.items() if name in own or name.rpartition(".")[0] in own}
    apply_expert_parallelism(model, mesh, tokens, chosen, ep_implementation=_EXCHANGE)
    for module in experts.modules:
        module.register_forward_pre_hook(_begin_exchange)
        module.register_forward_hook(_check_exchange)


def _begin_exchange(module: Any, inputs: Any) -> None:
    # A recomputation may stop inside of the call before.
    module.exchange.calls = 0


def _check_exchange(module: Any, inputs: Any, output: Any) -> None:
    """Raise ModelError if a call of experts exchanged no tokens: each rank would use its own experts only."""
    if module.exchange.calls != 1:
        raise ModelError(
            f"{type(module).__name__.removeprefix('FSDP')} computed without an exchange of tokens between the ranks "
            "that share its experts; choose ep_size: 1"
        )


def _expanded(model: Any) -> dict[str, str]:
    """Return the style of each module and parameter by name; parameters come before their module."""
    found: dict[str, str] = model._expand_parallel_plan(model.ep_plan or {})
    return found
