"""The model and the adapters of torchtune's recipes."""

from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, Drop, pointer_of
from train_loop.spec.importers.torchtune.fields import FUSED, FUSED_MLP, LINEAR, MLP
from train_loop.spec.importers.values import flag, number

_BUILDER = "model._component_"
_ADAPTERS = ("lora_", "qlora_")
_FIELDS = {"lora_rank": ("r", 8), "lora_alpha": ("alpha", 16), "lora_dropout": ("dropout", 0.0)}
_ARGUMENTS = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output", "lora_rank", "lora_alpha",
              "lora_dropout", "use_dora", "quantize_base")  # fmt: skip


def read_model(draft: Draft) -> bool:
    """Translate the builder of the model. Returns whether it trains adapters. Raises SpecError."""
    name = str(draft.get(_BUILDER, "")).rpartition(".")[2]
    if not name.startswith(_ADAPTERS):
        given = next((one for one in _ARGUMENTS if draft.has(f"model.{one}")), None)
        if given is not None:
            message = f"the builder {name:.60} trains all weights, and {given} is of one whose name starts with lora_"
            raise SpecError([Problem(pointer_of(f"model.{given}"), f"{message}; change one of the two")])
        draft.leave(_BUILDER, "the model's folder has its config.json; all weights are trained")
        return False
    draft.leave(_BUILDER, "the model's folder has its config.json; model.lora has the adapters")
    _targets(draft, is_fused="phi" in name)
    for field, (target, default) in _FIELDS.items():
        draft.take(f"model.{field}", f"model.lora.{target}", number)
        draft.assume(f"model.{field}", f"model.lora.{target}", default, tool="torchtune")
    if flag(draft.get("model.use_dora", False)):
        draft.write("model.use_dora", "model.lora.use_dora", True)
    if name.startswith("qlora_") or flag(draft.get("model.quantize_base", False)):
        field = "model.quantize_base" if draft.has("model.quantize_base") else _BUILDER
        reason = "other scales than those of torchao: weights differ by a few percent"
        draft.write(field, "model.quantize_base", "nf4", reason=reason, numbers=True)
    return True


def _targets(draft: Draft, *, is_fused: bool) -> None:
    """Write the modules with adapters, by transformers' names. Raises SpecError for unknown modules."""
    field = "model.lora_attn_modules"
    given: Any = draft.get(field)
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one in LINEAR for one in given):
        message = f"invalid lora_attn_modules; expected a list of {', '.join(LINEAR)}"
        raise SpecError([Problem(pointer_of(field if draft.has(field) else _BUILDER), message)])
    names = FUSED if is_fused else LINEAR
    has_mlp = flag(draft.get("model.apply_lora_to_mlp", False))
    mlp = (FUSED_MLP if is_fused else MLP) if has_mlp else ()
    written = [*dict.fromkeys(names[one] for one in given), *mlp]
    reason = "names of transformers"
    if is_fused:
        reason += ", which joins q, k and v, and gate and up, to one matrix each: other adapters, and more of them"
    for source in (field, "model.apply_lora_to_mlp")[: 1 + has_mlp]:
        draft.write(source, "model.lora.target_modules", [*written], reason=reason, numbers=is_fused)
    output = Drop("the head has no adapters here; name lm_head in model.lora.modules_to_save to train it whole",
                  numbers=True)  # fmt: skip
    draft.apply({"apply_lora_to_output": output, "apply_lora_to_mlp": Drop("off")}, below="model")
