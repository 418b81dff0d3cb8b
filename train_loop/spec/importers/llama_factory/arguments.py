"""LLaMA-Factory's configurations for full, LoRA and QLoRA fine-tuning and pre-training → a spec."""

from typing import Any

from pydantic import JsonValue

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, pointer_of
from train_loop.spec.importers.folders import read_folder
from train_loop.spec.importers.hugging_face import transformers
from train_loop.spec.importers.llama_factory.data import read_data
from train_loop.spec.importers.llama_factory.defaults import DEFAULTS
from train_loop.spec.importers.llama_factory.fields import REFUSED, RULES
from train_loop.spec.importers.parts import read_adapters
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.values import flag, number
from train_loop.spec.model import ALL_LINEAR

NAME = "LLaMA-Factory"
_STAGES = {"sft": "", "pt": ""}
_METHODS = ("full", "lora")
_BITS = {4: "nf4", 8: "int8"}
_ATTENTION = {
    "auto": "auto",
    "disabled": "sdpa",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}
_OFF = (None, False, "")
_RECOMPUTATION = "model.gradient_checkpointing"
_LORA = {
    "r": "lora_rank",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target",
    "modules_to_save": "additional_target",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def read_llama_factory(source: Source) -> Draft:
    """Return the draft of a job from a configuration of LLaMA-Factory. Raises SpecError."""
    draft = Draft(source.data)
    _check_kind(draft)
    read_folder(draft, "model_name_or_path", "model.path")
    _method(draft)
    _precision(draft)
    _optimizer(draft)
    read_data(draft)
    draft.take("ray_num_workers", "scaling.num_workers", number)
    transformers.read_arguments(draft, RULES, defaults=DEFAULTS, tool=NAME)
    draft.finish(NAME)
    return draft


def _check_kind(draft: Draft) -> None:
    """Raise SpecError for runs that are not pre-training, or a full or LoRA fine-tune of a language model."""
    stage, method = str(draft.get("stage", "sft")), str(draft.get("finetuning_type", "lora"))
    if stage not in _STAGES:
        hint = "; model.head: reward trains on chosen and rejected" if stage == "rm" else ""
        raise SpecError([Problem("/stage", f"the stage {stage:.20} is not imported; sft and pt are{hint}")])
    if method not in _METHODS:
        hint = "; for a part of the weights, set model.freeze_module_prefix" if method == "freeze" else ""
        message = f"finetuning_type: {method:.20} is not imported; full and lora are{hint}"
        raise SpecError([Problem("/finetuning_type", message)])
    for field, what in REFUSED.items():
        if draft.get(field) not in _OFF:
            message = f"{field} asks for {what}, which is not imported; remove it, or write a spec"
            raise SpecError([Problem(pointer_of(field), message)])
    if not draft.has("model_name_or_path"):
        raise SpecError([Problem("", "LLaMA-Factory needs model_name_or_path, and the file has none; add it")])
    if not flag(draft.get("do_train", False)):
        pointer = "/do_train" if draft.has("do_train") else ""
        message = "the file trains nothing: do_train is off; set do_train: true, or see jobs of kind: infer"
        raise SpecError([Problem(pointer, message)])


def _method(draft: Draft) -> None:
    """Translate the adapters, which LLaMA-Factory trains by default. Raises SpecError for contradictions."""
    quantised, folder = number(draft.get("quantization_bit")), draft.get("adapter_name_or_path")
    if draft.get("finetuning_type", "lora") == "full":
        for field, value in (("quantization_bit", quantised), ("adapter_name_or_path", folder)):
            if value is not None:
                raise SpecError(
                    [Problem(pointer_of(field), f"{field} needs finetuning_type: lora; change one of the two")]
                )
        draft.leave("finetuning_type", "all weights are trained")
        for field in (*_LORA.values(), "loraplus_lr_ratio"):
            draft.leave(field, "finetuning_type: full")
        return
    draft.leave("finetuning_type", "model.adapter" if folder else "model.lora")
    if quantised is not None:
        if not isinstance(quantised, int) or quantised not in _BITS:
            raise SpecError([Problem("/quantization_bit", f"{quantised!s:.20} bits are not supported; choose 4 or 8")])
        reason = "other scales than those of bitsandbytes: weights differ by a few percent"
        draft.write("quantization_bit", "model.quantize_base", _BITS[quantised], reason=reason, numbers=True)
    if isinstance(folder, str) and "," in folder:
        message = "several adapters are merged before the run; export them with --merged, and name that folder"
        raise SpecError([Problem("/adapter_name_or_path", message)])
    if folder:
        read_folder(draft, "adapter_name_or_path", "model.adapter")
        for field in _LORA.values():
            draft.leave(field, "the folder has the adapters' settings")
    else:
        _adapters(draft)


def _adapters(draft: Draft) -> None:
    rank, alpha = number(draft.get("lora_rank", 8)), number(draft.get("lora_alpha"))
    scale: JsonValue = 2 * rank if isinstance(rank, int) else 16
    if draft.has("lora_alpha") and not alpha:
        draft.write("lora_alpha", "model.lora.alpha", scale, reason="twice the rank")
    fields = {name: field for name, field in _LORA.items() if name != "target_modules"}
    if draft.has("lora_target"):
        fields["target_modules"] = _LORA["target_modules"]
    else:
        draft.assume("lora_target", "model.lora.target_modules", ALL_LINEAR, tool=NAME)
    read_adapters(draft, fields, {"r": 8, "alpha": scale, "dropout": 0.0}, tool=NAME)


def _precision(draft: Draft) -> None:
    """Translate what LLaMA-Factory has besides bf16 and fp16, and its recomputation, which is on by default."""
    if flag(draft.get("pure_bf16", False)):
        reason = "weights and optimizer states, too; fp32 is more exact, and takes twice the memory"
        draft.write("pure_bf16", "model.dtype", "bf16")
        draft.write("pure_bf16", "model.master_dtype", "bf16", reason=reason, numbers=True)
        for name in ("bf16", "fp16"):
            draft.leave(name, "pure_bf16 decides")
    draft.leave("pure_bf16", "off")
    given, offloads = "disable_gradient_checkpointing", flag(draft.get("use_unsloth_gc", False))
    if flag(draft.get(given, False)) or not offloads:
        draft.take(given, _RECOMPUTATION, lambda value: "none" if flag(value) else "full", reason="memory only")
    else:
        draft.write("use_unsloth_gc", _RECOMPUTATION, "offload", reason="inputs of layers are kept in host memory")
    for name in (given, "use_unsloth_gc", "gradient_checkpointing"):
        draft.leave(name, "another field decides")
    if draft.has("flash_attn"):
        kind = str(draft.get("flash_attn"))
        draft.write("flash_attn", "model.attn_implementation", _ATTENTION.get(kind, kind))


def _optimizer(draft: Draft) -> None:
    """Translate Muon and LoRA+, and the phases of warmup_stable_decay. Raises SpecError."""
    if flag(draft.get("use_muon", False)):
        draft.write("use_muon", "training.optimizer", "muon", reason="steps have another scale", numbers=True)
    draft.leave("use_muon", "off")
    ratio = number(draft.get("loraplus_lr_ratio"))
    if ratio is not None:
        draft.write("loraplus_lr_ratio", "training.groups", [{"params": ["*lora_B*"], "lr_scale": ratio}])
    options: Any = draft.get("lr_scheduler_kwargs", {})
    if draft.get("lr_scheduler_type") == "warmup_stable_decay" and "num_decay_steps" not in (options or {}):
        message = (
            "LLaMA-Factory decays in the last two thirds after the warm-up; add lr_scheduler_kwargs.num_decay_steps"
        )
        raise SpecError([Problem("/lr_scheduler_type", message)])


_HANDLED = names_of(
    "model_name_or_path adapter_name_or_path dataset eval_dataset packing pure_bf16 use_muon loraplus_lr_ratio "
    "flash_attn disable_gradient_checkpointing use_unsloth_gc ray_num_workers"
)
"""Fields without a rule, whose meaning depends on others."""
TOOL = Tool(
    NAME,
    marks=names_of(
        "finetuning_type cutoff_len stage template dataset_dir plot_loss val_size pref_loss overwrite_cache "
        "mask_history neat_packing quantization_bit train_on_prompt"
    ),
    convert=read_llama_factory,
    defaults=DEFAULTS,
    shared=(
        *_HANDLED,
        *_LORA.values(),
        *transformers.TOOL.shared,
        *(name.partition(".")[0] for name in (*RULES, *REFUSED)),
    ),
    extends=transformers.NAME,
)
