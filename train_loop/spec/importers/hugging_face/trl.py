"""Hugging Face's TRL: files of `trl sft` and `trl reward`, and SFTConfig and RewardConfig as JSON."""

from typing import Any

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.importers.draft import Draft, NotSupportedError
from train_loop.spec.importers.hugging_face import transformers
from train_loop.spec.importers.hugging_face.trl_data import read_files, read_length, read_rows
from train_loop.spec.importers.hugging_face.trl_fields import ADAPTERS, REWARD, RULES, SFT
from train_loop.spec.importers.parts import read_adapters
from train_loop.spec.importers.recognise import Source, Tool, names_of
from train_loop.spec.importers.report import Outcome
from train_loop.spec.importers.values import attention, dtype, flag, is_absolute, model_folder

NAME = "TRL"
_LOSSES = ("nll", "chunked_nll")
_OF_SFT = names_of(
    "dataset_text_field completion_only_loss assistant_only_loss packing packing_strategy eval_packing padding_free "
    "shuffle_dataset dataset_kwargs max_seq_length"
)
"""Fields that no other trainer of TRL has."""
_KERNELS = {
    "eager": "sdpa",
    "kernels-community/flash-attn": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
    "kernels-community/flash-attn3": "flash_attention_3",
    "kernels-community/vllm-flash-attn3": "flash_attention_3",
}


def read_sft(source: Source) -> Draft:
    """Return the draft of a job from a file of `trl sft`. Raises SpecError."""
    draft = Draft(source.data)
    _check_trainer(draft)
    read_rows(draft)
    _read_common(draft)
    transformers.read_arguments(draft, RULES, defaults=SFT, tool=NAME)
    if not any(draft.has(field) for field in _OF_SFT):
        draft.differ("no field names the trainer: the file is read as that of trl sft")
    draft.finish(NAME)
    return draft


def read_reward(source: Source) -> Draft:
    """Return the draft of a job from a file of `trl reward`."""
    draft = Draft(source.data)
    factor = "center_rewards_coefficient"
    head: Any = {"reward": {factor: draft.get(factor)}} if draft.has(factor) else "reward"
    draft.write(factor, "model.head", head)
    read_files(draft)
    read_length(draft)
    for column in ("chosen", "rejected"):
        draft.assume("", f"data.columns.{column}", column, tool="trl reward")
    draft.assume("", "data.on_long_rows", "drop", tool="trl reward")
    _read_common(draft)
    transformers.read_arguments(draft, RULES, defaults=REWARD, tool=NAME)
    draft.finish(NAME)
    return draft


def _check_trainer(draft: Draft) -> None:
    """Raise SpecError for a loss or a head that `trl sft` does not have."""
    loss = draft.get("loss_type", _LOSSES[0])
    if loss not in _LOSSES:
        message = f"the loss {loss!s:.40} is not imported; expected nll, the loss of the next token"
        raise SpecError([Problem("/loss_type", message)])
    if draft.get("lora_task_type") == "SEQ_CLS":
        message = "SEQ_CLS is a reward model: for trl reward, add center_rewards_coefficient: null"
        raise SpecError([Problem("/lora_task_type", message)])


def _read_common(draft: Draft) -> None:
    """Translate what SFT and reward models share, before the fields of TrainingArguments."""
    _model(draft)
    _adapters(draft)
    if draft.has("bf16") and not draft.flag("bf16") and not draft.flag("fp16"):
        draft.write("bf16", "model.dtype", "fp32", reason="without autocast")
        draft.leave("fp16", "off")
    if draft.flag("activation_offloading"):
        reason = "inputs of layers are kept in host memory; numbers stay"
        draft.write("activation_offloading", "model.gradient_checkpointing", "offload", reason=reason)


def _model(draft: Draft) -> None:
    """Translate the folder, its weights' dtype and the kernels of attention; `model_init_kwargs` win."""
    field = "model_name_or_path"
    value = draft.get(field)
    if isinstance(value, str) and is_absolute(value):
        draft.write(field, "model.path", value)
    elif value is not None:
        uri = model_folder(str(value))
        reason = f"run `hf download {value} --local-dir {uri.removeprefix('file://')}` below a storage root"
        draft.need("model.path", uri, reason, field=field)
    fields = names_of("model_init_kwargs.dtype model_init_kwargs.torch_dtype dtype torch_dtype")
    _first(draft, fields, "model.master_dtype", _weights)
    _first(draft, names_of("model_init_kwargs.attn_implementation attn_implementation"),
           "model.attn_implementation", lambda name: _KERNELS.get(str(name)) or attention(name))  # fmt: skip


def _first(draft: Draft, fields: tuple[str, ...], target: str, convert: Any) -> None:
    """Write the value of the first field that is set."""
    chosen = next((field for field in fields if draft.has(field)), None)
    if chosen is None:
        return
    draft.take(chosen, target, convert)
    for field in fields:
        if field != chosen:
            draft.leave(field, f"{chosen} wins")


def _weights(value: Any) -> Any:
    """Return the dtype of weights between steps."""
    name = dtype(value)
    if name in ("fp32", "bf16"):
        return name
    if name == "auto":
        raise NotSupportedError("weights stay fp32 between steps; if the folder's are bf16, TRL trains those: set "
                                "model.master_dtype: bf16")  # fmt: skip
    raise NotSupportedError("weights stay fp32 between steps")


def _adapters(draft: Draft) -> None:
    """Translate the adapters, which TRL trains if use_peft is on."""
    if not draft.flag("use_peft"):
        return
    draft.note("use_peft", Outcome.NOT_NEEDED, reason="model.lora")
    read_adapters(draft, ADAPTERS, {"r": 16, "alpha": 32, "dropout": 0.05}, tool=NAME)
    for field, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if flag(draft.get(field, False)):
            reason = "other scales than those of bitsandbytes: weights differ by a few percent"
            draft.write(field, "model.quantize_base", kind, reason=reason, numbers=True)


_OWN = names_of(
    "model_name_or_path model_revision dtype torch_dtype attn_implementation trust_remote_code dataset_name datasets "
    "dataset_config streaming dataset_num_proc dataset_batch_size max_length packing max_seq_length lora_r lora_alpha "
    "lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save use_rslora use_dora load_in_4bit "
    "load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage router_aux_loss_coef eos_token pad_token loss_type "
    "pad_to_multiple_of activation_offloading disable_dropout env"
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
    defaults=SFT,
    shared=(*_OWN, *transformers.TOOL.shared),
    extends=transformers.NAME,
)
REWARD_TOOL = Tool(
    "TRL's reward",
    marks=("center_rewards_coefficient",),
    convert=read_reward,
    defaults=REWARD,
    shared=(*TOOL.marks, *TOOL.shared),
    extends=NAME,
)
OTHERS = Tool(
    "TRL's DPO, KTO, GRPO, RLOO or distillation",
    marks=names_of(
        "beta max_completion_length max_prompt_length ref_model_init_kwargs sync_ref_model "
        "f_divergence_type loss_weights desirable_weight num_generations reward_funcs reward_weights use_vllm "
        "teacher_model_name_or_path reward_model_path reward_model_name_or_path use_weighting "
        "discopop_tau lmbda"
    ),
    extends=NAME,
    refusal="which is not imported; jobs train on answers (trl sft), or on pairs (trl reward)",
)
