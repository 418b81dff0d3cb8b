"""Tensor parallelism by transformers' own plans: ranks share each layer, by its heads and by the rows of its MLP.

Every parameter becomes a `DTensor` of the ranks that share layers, also if each of them has all of it. Optimizers,
norms and checkpoints then see one mesh.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from train_loop.errors import ModelError
from train_loop.model.families.anatomy import Anatomy
from train_loop.model.families.causal.build import config_of
from train_loop.model.families.causal.config import SOURCE
from train_loop.model.families.causal.experts import experts_of
from train_loop.model.families.causal.heads import has_labels
from train_loop.model.families.causal.parallel.sequence import find_regions
from train_loop.model.families.causal.probe import ModelProbe
from train_loop.model.families.family import AttentionUse
from train_loop.model.lora.adapters import shared_plan, without_adapters
from train_loop.plan import divisors, one_of
from train_loop.spec import JobSpec

try:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism
except ImportError:  # an older version, which trains everything else
    apply_tensor_parallelism = None

_KINDS = """
    arcee cohere cohere2 cohere_compass_text cwm ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_unified_text glm glm4
    gpt_neox granite helium hrm_text hyperclovax internlm3 iquestcoder jais2 llama ministral ministral3 mistral nanochat
    nemotron olmo olmo2 olmo3 phi phi3 qwen2 qwen3 seed_oss smollm3 starcoder2 vaultgemma youtu
"""
_MIXTURES = """
    aria_text axk1 cohere2_moe deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe hy_v3 kolibri1
    laguna mellum minimax minimax_m2 minimax_m3_vl_text mixtral olmoe qwen2_moe qwen3_moe solar_open
"""
MIXTURES = frozenset(_MIXTURES.split())
"""Families proven with `ep_size` by `tests/families/test_expert_parallel.py`, and with `sequence_parallel` as below."""
PROVEN = frozenset(_KINDS.split())
"""Families whose loss and gradients are compared with those of one rank.

`tests/families/test_tensor.py` and, with `sequence_parallel`, `test_sequence_parallel.py` do so.

Others have a plan, too, but for example the sharing of apertus' activations gives other gradients.
"""
_ADAPTED = {"llama", "phi3", "qwen2", "qwen3", "qwen3_moe"} | {"cohere", "gemma3_text", "gpt_neox", "glm4"}
_ADAPTED |= {"nemotron", "olmo2", "youtu"}
"""Families of which gradients of adapters have been compared, those of the first line with peft's, too."""
_SPLIT_HEADS = ("k_proj", "qkv_proj", "query_key_value")
"""Projections that give a rank the keys of its heads, if their plan is `colwise`."""
_KEYS = ("k_proj", "v_proj")
"""Projections of which a rank can also use only the rows of its head."""
_OF_OWN_HEADS = "replicated_with_grad_allreduce"
"""Style of weights that each rank has whole, and uses for its own heads only, so that gradients are parts of a sum."""
OWN_ROWS = "rows of own head"
"""Our style of `_KEYS` with fewer heads than ranks: each rank has them whole, and uses the rows of its head."""
SPLIT_ROWS = {"colwise", "colwise_gather_output", "embedding_rowwise"}
SPLIT_COLUMNS = {"rowwise", "rowwise_split_input"}
_STYLES = {*SPLIT_ROWS, *SPLIT_COLUMNS, _OF_OWN_HEADS}


def check_plan(model: Any, seen: ModelProbe, spec: JobSpec) -> None:
    """Raise ModelError if ranks cannot share the layers of a model."""
    size, sequences, kind = spec.strategy.tp_size, spec.strategy.ulysses_size, config_of(model).model_type
    if size == 1:
        return
    if apply_tensor_parallelism is None:
        raise ModelError(f"tp_size={size} needs transformers 5.21 or newer, and this is {SOURCE}; install it")
    if reason := _fault_of_plan(model):
        raise ModelError(
            f"tp_size={size} needs a plan of how ranks share layers, which {SOURCE} has for many families; that of "
            f"model_type={kind} {reason}; choose tp_size: 1, or another family, for example qwen3 or llama"
        )
    if experts_of(model) and spec.strategy.ep_size == 1:
        raise ModelError(
            f"tp_size={size} shares the experts of {type(model).__name__} by ep_size, which must be a multiple of "
            f"tp_size; set ep_size: {size}"
        )
    if kind not in PROVEN | MIXTURES:
        raise ModelError(
            f"tp_size={size} is not proven for model_type={kind}; see the proven families on the page on tensor "
            "parallelism; choose tp_size: 1, or another family, for example qwen3 or llama"
        )
    if spec.model.lora is not None and kind not in _ADAPTED:
        raise ModelError(
            f"tp_size={size} is not proven with adapters for model_type={kind}; those proven are "
            f"{one_of(sorted(_ADAPTED))}; choose tp_size: 1"
        )
    for name, use in seen.attention.items():
        if not _can_divide(_own_heads(model, use, size), sequences):
            fits = [n for n in divisors(use.heads) if _can_divide(_own_heads(model, use, n), sequences)]
            raise ModelError(
                f"tp_size={size} must divide the {use.kv_heads} kv heads of {name}, or be a multiple of them, and "
                f"tp_size x ulysses_size={size * sequences} must divide its {use.heads} heads; ulysses_size must "
                "divide a rank's kv heads, or be a multiple of them; choose "
                f"{f'tp_size={one_of(fits)}' if fits else 'another ulysses_size'}"
            )
        if spec.model.lora is not None and use.kv_heads < size:
            raise ModelError(
                f"tp_size={size} is not proven with adapters for fewer kv heads than tp_size, and {name} has "
                f"{use.kv_heads}; choose tp_size: {use.kv_heads}, or remove lora"
            )
    if seen.after_head is None and spec.model.label_head is None:
        raise ModelError(
            f"tp_size={size} computes the loss from parts of the logits, and those of {seen.model} are more than the "
            "output of its head, scaled or capped; choose tp_size: 1"
        )
    _check_config(model, size)
    _check_weights(model, seen.attention, size)


def _fault_of_plan(model: Any) -> str | None:
    """Return the fault of a family's plan; None if ranks can share its layers."""
    plan = _plan(model)
    strange = sorted({*plan.values()} - _STYLES)
    if any("experts" in style for style in strange):
        return "splits experts, and names no whole ones for ep_size"
    if strange:
        return f"has parts of the style {', '.join(strange)}"
    if not plan:
        return "is missing"
    return None if any("layers." in name for name in plan) else "splits none of its layers"


def _check_weights(model: Any, attention: Mapping[str, AttentionUse], size: int) -> None:
    """Raise ModelError for weights with wrong gradients, and for weights too small for the ranks.

    In attention and MLPs that ranks share, a weight without a plan would be whole on each rank, which uses it for its
    own heads or rows only.
    """
    plan = _styles(model, attention, size)
    shared = tuple(f"{name.rpartition('.')[0]}." for name, style in plan.items() if style == "rowwise")
    for name, parameter in without_adapters(model).items():
        style = plan.get(name) or plan.get(name.rpartition(".")[0])
        if style is None and name.startswith(shared):
            raise ModelError(
                f"tp_size={size} needs a plan for each weight of attention and MLP, and {SOURCE} has none for {name}; "
                "choose tp_size: 1, or change the setting of the model's config that adds it"
            )
        dim = 0 if style in SPLIT_ROWS else parameter.ndim - 1
        length = parameter.shape[dim] if style in SPLIT_ROWS | SPLIT_COLUMNS else size
        if -(-length // size) * (size - 1) >= length:
            raise ModelError(
                f"tp_size={size} leaves a worker without a part of {name}, whose size is {list(parameter.shape)}; "
                "choose a smaller tp_size"
            )


def _check_config(model: Any, size: int) -> None:
    """Raise ModelError for dropout and noise, for which ranks would have to draw alike, and for clipped projections.

    transformers clips them in place, which torch rejects for parts of a `DTensor`.
    """
    config: dict[str, Any] = config_of(model).to_dict()
    unused = "classifier_dropout" if not has_labels(model) else None
    for kind, part in (("dropout", "drop"), ("noise on inputs of routers", "jitter")):
        rates = {name: value for name, value in config.items() if part in name and name != unused and _is_rate(value)}
        found = next((f"{name}: {value}" for name, value in rates.items() if value), None)
        if found is not None:
            raise ModelError(
                f"tp_size={size} is not proven with {kind}, and the model's config has {found}; set it to 0.0"
            )
    if (limit := config.get("clip_qkv")) is not None:
        raise ModelError(
            f"tp_size={size} cannot clip projections, and the model's config has clip_qkv: {limit}; "
            "choose tp_size: 1, or a model without clip_qkv"
        )


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def heads_of_rank(model: Any, attention: Mapping[str, AttentionUse], size: int) -> dict[str, AttentionUse]:
    """Return the heads of each attention module that a rank has if `size` of them share the layers."""
    owned = {name: _own_heads(model, use, size) for name, use in attention.items()}
    return {name: use for name, use in owned.items() if use is not None}


def _own_heads(model: Any, use: AttentionUse, size: int) -> AttentionUse | None:
    """Return a rank's heads; None if they do not divide. Where a plan gathers keys, each rank has all heads."""
    if not _splits(model, _SPLIT_HEADS):
        return use
    repeated = _splits(model, _KEYS) and size % use.kv_heads == 0
    if use.heads % size or (use.kv_heads % size and not repeated):
        return None
    return use._replace(heads=use.heads // size, kv_heads=max(use.kv_heads // size, 1))


def _can_divide(own: AttentionUse | None, sequences: int) -> bool:
    """Return whether Ulysses can divide a rank's heads; None are no heads."""
    return own is not None and not (own.heads % sequences or (own.kv_heads % sequences and sequences % own.kv_heads))


def _splits(model: Any, projections: Sequence[str]) -> bool:
    """Return whether a plan gives each rank its own rows of one of the projections."""
    return any(name.rpartition(".")[2] in projections and style == "colwise" for name, style in _plan(model).items())


def share_layers(
    anatomy: Anatomy, mesh: DeviceMesh, attention: Mapping[str, AttentionUse], *, split_states: bool = False
) -> None:
    """Split a model on the meta device over a mesh, in place. Tied embeddings stay one parameter.

    With `split_states`, `SplitStates` must follow, which makes projections use the parameters that are split here.
    """
    model, head, table, tied = anatomy.model, anatomy.head, anatomy.embeddings, anatomy.is_tied
    plan, names = expanded_plan(model, attention, mesh.size()), {module: name for name, module in model.named_modules()}
    if tied and head is not None and table is not None:
        # The head has its rows of the vocabulary, and the embeddings must have the same.
        plan |= dict.fromkeys((names[table], f"{names[table]}.weight"), "embedding_rowwise")
        del plan[f"{names[head]}.weight"]
    regions = find_regions(model, plan, attention) if split_states else None
    whole = {name for name, style in plan.items() if style in (_OF_OWN_HEADS, OWN_ROWS)}
    others = whole if regions is None else whole | regions.projections(plan).keys()
    apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name not in others})
    if tied and head is not None and table is not None:
        head.weight = table.weight
    few, experts = few_keys(plan, attention), () if anatomy.experts is None else anatomy.experts.modules
    for module, name in names.items():
        rows = _rows_of_rank(module, few[name], mesh) if name in few else None
        is_part = name in whole or (regions is not None and regions.has_part(name))
        if module not in experts:
            _keep_whole(module, mesh, Partial() if is_part else Replicate(), rows)
        if rows is not None and regions is None:
            module.forward = functools.partial(_with_summed_gradient, mesh, module.forward)
    repeat_keys(model, attention, mesh.size() if few else 1)


def expanded_plan(model: Any, attention: Mapping[str, AttentionUse], size: int) -> dict[str, str]:
    """Return the style of each module and parameter by name, also of adapters; parameters come before their module."""
    return shared_plan(model, _styles(model, attention, size), rows=SPLIT_ROWS)


def _styles(model: Any, attention: Mapping[str, AttentionUse], size: int) -> dict[str, str]:
    """Return the styles by the names of modules, those with adapters and others, and of parameters of the others."""
    plan: dict[str, str] = model._expand_parallel_plan(_plan(model))
    few = {f"{name}.{leaf}" for name, use in attention.items() if use.kv_heads < size for leaf in _KEYS}
    return {
        name: OWN_ROWS if style == "colwise" and few & {name, name.rpartition(".")[0]} else style
        for name, style in plan.items()
    }


def _plan(model: Any) -> dict[str, str]:
    """Return the style of each kind of module and parameter, without experts, which ranks share by another plan."""
    experts = tuple(f"{name}." for name in model.ep_plan or ())
    return {name: style for name, style in (model.tp_plan or {}).items() if not f"{name}.".startswith(experts)}


def few_keys(plan: Mapping[str, str], attention: Mapping[str, AttentionUse]) -> dict[str, int]:
    """Return the projections of keys and values with fewer heads than ranks, and the number of their heads."""
    projections = {f"{name}.{leaf}": use.kv_heads for name, use in attention.items() for leaf in _KEYS}
    return {name: heads for name, heads in projections.items() if plan.get(name) == OWN_ROWS}


def repeat_keys(model: Any, attention: Mapping[str, AttentionUse], size: int) -> None:
    """Make attention repeat each of a rank's keys for its queries, of which it has fewer for one key than others."""
    for name, own in heads_of_rank(model, attention, size).items() if size > 1 else ():
        model.get_submodule(name).num_key_value_groups = own.heads // own.kv_heads


def _rows_of_rank(projection: Any, heads: int, mesh: DeviceMesh) -> slice:
    """Return the rows of the one head of a projection that this rank uses; consecutive ranks share a head."""
    width, head = projection.out_features // heads, mesh.get_local_rank() * heads // mesh.size()
    return slice(head * width, (head + 1) * width)


def _keep_whole(module: nn.Module, mesh: DeviceMesh, gradient: Partial | Replicate, rows: slice | None) -> None:
    """Make a module's own parameters `DTensor`s that each rank has whole, unless they are split.

    The module computes with plain tensors, or only with some rows of them. `gradient` is the placement of a rank's
    gradient: all of it, or a part of a sum.
    """
    own = {leaf: p for leaf, p in module._parameters.items() if p is not None and not isinstance(p, DTensor)}
    if not own:
        return
    for leaf, parameter in own.items():
        placed = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
        module._parameters[leaf] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    module.forward = functools.partial(_with_plain, module, tuple(own), (gradient,), rows, module.forward)


def _with_plain(
    module: nn.Module,
    leaves: Sequence[str],
    gradient: Sequence[Partial | Replicate],
    rows: slice | None,
    forward: Callable[..., Any],
    *inputs: Any,
    **named: Any,
) -> Any:
    held: dict[str, Any] = {leaf: module._parameters[leaf] for leaf in leaves}
    plain = {leaf: one.to_local(grad_placements=gradient) for leaf, one in held.items()}
    module._parameters.update(plain if rows is None else {leaf: one[rows] for leaf, one in plain.items()})
    try:
        return forward(*inputs, **named)
    finally:
        module._parameters.update(held)


def _with_summed_gradient(mesh: DeviceMesh, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call a module with an input that ranks use for different outputs, so that its gradient is a sum over them."""
    return forward(DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()]))
