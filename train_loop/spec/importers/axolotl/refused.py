"""Configurations of axolotl that are not imported."""

from pydantic import JsonValue

OFF: tuple[JsonValue, ...] = (None, False, "", [], {})
"""Values that switch a feature off."""
REFUSED = {
    "rl": "reinforcement learning or training on preferences",
    "reward_model": "a reward model, which model.head: reward trains on chosen and rejected",
    "process_reward_model": "a reward model of steps",
    "qat": "quantisation-aware training",
    "relora": "ReLoRA",
    "diffusion": "a diffusion model of text",
    "gptq": "training on a GPTQ folder",
    "reinit_weights": "training from random weights, which model.config starts",
    "processor_type": "images or audio",
    "image_size": "images",
    "is_multimodal": "images or audio",
    "use_onebitllms": "training in one bit",
    "use_eaft": "the EAFT loss",
    "use_pose": "PoSE",
    "unfrozen_parameters": "a part of the weights; name the others in model.freeze_module_prefix",
    "trainer_cls": "own code in place of the trainer",
    "batch_size": "given a batch of all processes; set gradient_accumulation_steps to batch_size / micro_batch_size / "
    "processes",
    "llmcompressor": "compression",
    "kd_trainer": "knowledge distillation",
    "merge_lora": "a merge of adapters, which trainshed export does",
    "inference": "inference; see kind: infer",
}
"""Fields that make a run another one than a full or LoRA fine-tune, with the words for it."""

PLUGINS = ("cut_cross_entropy", "liger", "kernels", "swanlab", "lm_eval", "expert_parallel")
"""Plugins that change no numbers, by the last part of their package."""
