"""The adapters of axolotl's configurations."""

from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, NotSupportedError, pointer_of
from train_loop.spec.importers.folders import read_folder
from train_loop.spec.importers.parts import read_adapters
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag, names, number
from train_loop.spec.model import ALL_LINEAR

_KINDS = ("lora", "qlora")
_FIELDS = {
    "r": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora",
}
_OTHERS = ("peft_layers_to_transform", "peft_init_lora_weights", "lora_target_linear", "lora_model_dir")
_BITS = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}


def read_adapter(draft: Draft) -> bool:
    """Translate the adapters. Returns whether they are trained. Raises SpecError for contradictions."""
    kind: Any = draft.get("adapter") or None
    if kind is not None and kind not in _KINDS:
        raise SpecError([Problem("/adapter", f"adapter {kind!s:.40} is not supported; choose lora or qlora")])
    quantised = [name for name in _BITS if flag(draft.get(name, False))]
    if kind is None:
        if quantised:
            message = f"{quantised[0]} needs adapters, because all weights would be trained; set adapter: qlora"
            raise SpecError([Problem(pointer_of(quantised[0]), message)])
        draft.unset("adapter")
        for name in (*_FIELDS.values(), *_OTHERS, *_BITS, "adapter"):
            draft.leave(name, "no adapter: all weights are trained")
        return False
    if kind == "qlora" and "load_in_4bit" not in quantised:
        raise SpecError([Problem("/adapter", "adapter: qlora needs load_in_4bit: true; add it")])
    draft.note("adapter", Outcome.NOT_NEEDED, reason="model.adapter" if draft.has("lora_model_dir") else "model.lora")
    _quantisation(draft, quantised)
    if draft.has("lora_model_dir"):
        read_folder(draft, "lora_model_dir", "model.adapter")
        for name in (*_FIELDS.values(), *_OTHERS):
            if name != "lora_model_dir":
                draft.leave(name, "the folder has the adapters' settings")
        return True
    _settings(draft)
    return True


def _quantisation(draft: Draft, quantised: list[str]) -> None:
    for name in quantised:
        reason = "other scales than those of bitsandbytes: weights differ by a few percent"
        draft.write(name, "model.quantize_base", _BITS[name], reason=reason, numbers=True)
    for name in _BITS:
        draft.leave(name, "off")


def _settings(draft: Draft) -> None:
    """Write model.lora. Raises SpecError if axolotl's settings are not complete."""
    missing = [name for name in ("lora_r", "lora_alpha") if not draft.has(name)]
    if missing:
        raise SpecError([Problem("/adapter", f"adapters need {' and '.join(missing)}; add a value")])
    target = "model.lora.target_modules"
    modules, parameters = draft.get("lora_target_modules"), draft.get("lora_target_parameters")
    every = flag(draft.get("lora_target_linear", False))
    if every:
        draft.write("lora_target_linear", target, ALL_LINEAR)
        draft.leave("lora_target_modules", "lora_target_linear adds all of them")
    elif not modules and not parameters:
        raise SpecError([Problem("/adapter", "adapters need lora_target_modules or lora_target_linear; add one")])
    draft.leave("lora_target_linear", "off")
    fields = {name: field for name, field in _FIELDS.items() if name != "target_modules"}
    if modules and not every:
        fields["target_modules"] = _FIELDS["target_modules"]
    read_adapters(draft, fields, {"dropout": 0.0}, tool="axolotl")
    if not every and not modules:
        draft.note("lora_target_parameters", Outcome.TRANSLATED, target=target, written=[], reason="no modules")
        draft.given["model"]["lora"]["target_modules"] = []
    draft.take("peft_layers_to_transform", "model.lora.layers", _layers)
    draft.take("peft_init_lora_weights", "model.lora.init", _first_values)


def _layers(value: Any) -> JsonValue:
    given = names(value)
    return [number(one) for one in given] if isinstance(given, list) else [number(given)]


def _first_values(value: Any) -> JsonValue:
    if value in (True, "true", "gaussian"):
        return "gaussian" if value == "gaussian" else "kaiming"
    raise NotSupportedError(f"adapters begin as kaiming or gaussian, and not as {value!s:.40}")
