"""Hugging Face's TRL: files for `trl sft --config`, and SFTConfig as JSON."""

from train_loop.spec.importers.draft import Draft, Drop, Rule, unneeded
from train_loop.spec.importers.hugging_face import transformers
from train_loop.spec.importers.hugging_face.defaults import TRAINER
from train_loop.spec.importers.hugging_face.transformers_fields import RULES
from train_loop.spec.importers.parts import read_adapters
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import flag

NAME = "TRL"
_QUANTIZED = Drop("only the frozen weights below adapters are quantised, so use_peft is needed", numbers=True)
_ADAPTERS = {
    "r": "lora_r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Fields of TRL's ModelConfig by field of `model.lora`."""
_RULES: dict[str, Rule] = {
    "use_peft": unneeded("off"),
    **{name: unneeded("use_peft is off") for name in _ADAPTERS.values()},
    "lora_task_type": unneeded("model.head"),
    "load_in_4bit": _QUANTIZED,
    "load_in_8bit": _QUANTIZED,
    "bnb_4bit_quant_type": Drop("4 bits are always nf4", numbers=True, harmless=(None, "nf4")),
    "use_bnb_nested_quant": unneeded("scales are bf16"),
}


def read_sft(source: Source) -> Draft:
    """Return the draft of a job from a file of `trl sft`."""
    draft = Draft(source.data)
    _adapters(draft)
    transformers.read_arguments(draft, RULES | _RULES)
    draft.finish(NAME)
    return draft


def _adapters(draft: Draft) -> None:
    """Translate the adapters, which TRL trains if use_peft is on."""
    if not flag(draft.get("use_peft", False)):
        return
    draft.note("use_peft", Outcome.NOT_NEEDED, reason="model.lora")
    read_adapters(draft, _ADAPTERS, {"r": 16, "alpha": 32, "dropout": 0.05}, tool=NAME)
    bits = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    for field, kind in bits.items():
        if flag(draft.get(field, False)):
            reason = "other scales than those of bitsandbytes: weights differ by a few percent"
            draft.write(field, "model.quantize_base", kind, reason=reason, numbers=True)


_OWN = names_of(
    "model_name_or_path model_revision dtype torch_dtype attn_implementation trust_remote_code dataset_name datasets "
    "dataset_config streaming dataset_num_proc max_length packing max_seq_length lora_r lora_alpha lora_dropout "
    "lora_target_modules lora_target_parameters lora_modules_to_save use_rslora use_dora load_in_4bit load_in_8bit "
    "bnb_4bit_quant_type bnb_4bit_quant_storage router_aux_loss_coef eos_token pad_token pad_to_multiple_of loss_type "
    "activation_offloading"
)
"""Fields that other tools than TRL have, and TrainingArguments do not."""
TOOL = Tool(
    NAME,
    marks=names_of(
        "dataset_text_field use_peft completion_only_loss assistant_only_loss packing_strategy eval_packing "
        "dataset_kwargs chat_template_path shuffle_dataset truncation_mode padding_free dataset_train_split "
        "dataset_test_split dataset_streaming ignore_bias_buffers lora_task_type use_bnb_nested_quant "
        "model_init_kwargs test_split_size"
    ),
    convert=read_sft,
    defaults=TRAINER,
    shared=(*_OWN, *transformers.TOOL.shared),
    extends=transformers.NAME,
)
OTHERS = Tool(
    "TRL's DPO, KTO, GRPO, RLOO or distillation",
    marks=names_of(
        "beta max_completion_length max_prompt_length precompute_ref_log_probs ref_model_init_kwargs sync_ref_model "
        "f_divergence_type loss_weights desirable_weight num_generations reward_funcs reward_weights use_vllm "
        "teacher_model_name_or_path cpo_alpha reward_model_path reward_model_name_or_path use_weighting ld_alpha "
        "discopop_tau simpo_gamma lmbda"
    ),
    extends=NAME,
    refusal="which is not imported; jobs train on answers (trl sft), or on pairs with model.head: reward",
)
