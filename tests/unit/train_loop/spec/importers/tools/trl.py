"""trl 1.16: random files of `trl sft`, and its rules, which are those of Trainer with other defaults."""

from typing import Any

from tests.unit.train_loop.spec.importers.tools import trainer
from tests.unit.train_loop.spec.importers.tools.hugging_face import adapted_by_peft
from tests.unit.train_loop.spec.importers.tools.run import Draws, Run, sometimes

_SFT: dict[str, list[Any]] = {
    "use_peft": [True, False],
    "dataset_text_field": ["text", "body"],
    "max_length": [512, 1024],
    "packing": [True, False],
    "packing_strategy": ["bfd", "bfd_split"],
    "truncation_mode": ["keep_start", "keep_end"],
    "dtype": ["float32", "bfloat16"],
    "padding_free": [False],
    "shuffle_dataset": [True, False],
    "assistant_only_loss": [False],
    "loss_type": ["nll", "chunked_nll"],
    "dataset_name": ["org/rows"],
    "model_name_or_path": ["org/model"],
}
_LORA: dict[str, list[Any]] = {
    "lora_r": [8, 16],
    "lora_alpha": [16, 32],
    "lora_dropout": [0.0, 0.05],
    "lora_modules_to_save": [None, ["lm_head"]],
    "use_rslora": [True, False],
    "use_dora": [True, False],
}
_DEFAULTS = {"learning_rate": 2e-5, "gradient_checkpointing": True, "logging_steps": 10}
_LONG = {"bfd": "truncate", "bfd_split": "split", "keep_start": "truncate", "keep_end": "truncate_left"}


def draw(draws: Draws) -> dict[str, Any]:
    """Return a random file of `trl sft`, with adapters or without."""
    file = trainer.drawn_arguments(draws) | {"dataset_text_field": "text"}
    for name, values in (_SFT | _LORA).items():
        sometimes(draws, file, name, values)
    if file.get("use_peft"):
        file["lora_target_modules"] = draws.choice([["q_proj", "v_proj"], "all-linear", ["down_proj"]])
    return file


def expected(file: dict[str, Any], *, processes: int) -> Run:
    """Return the run of TRL's rules: defaults of SFTConfig, then Trainer's own arithmetic."""
    own = {name: one for name, one in file.items() if name not in {*_SFT, *_LORA, "lora_target_modules"}}
    precision = {"bf16": not file.get("fp16", False)}
    args = trainer.arguments_of(own, **_DEFAULTS, **precision)
    run = trainer.run_of(args, size=args.per_device_train_batch_size, processes=processes)
    packs = file.get("packing", False)
    rule = file.get("packing_strategy", "bfd") if packs else file.get("truncation_mode", "keep_start")
    settings = trainer.settings_of(args) | {
        "data.sequence_length": file.get("max_length", 1024),
        "data.packing": packs,
        "data.on_long_rows": _LONG[rule],
        "model.master_dtype": {"float32": "fp32", "bfloat16": "bf16"}[file.get("dtype", "float32")],
    }
    return Run(*run, *_adapters(file), settings=settings)


def _adapters(file: dict[str, Any]) -> tuple[frozenset[str] | None, frozenset[str], float | None]:
    if not file.get("use_peft", False):
        return None, frozenset(), None
    return adapted_by_peft(
        r=file.get("lora_r", 16),
        lora_alpha=file.get("lora_alpha", 32),
        lora_dropout=file.get("lora_dropout", 0.05),
        target_modules=file["lora_target_modules"],
        modules_to_save=file.get("lora_modules_to_save"),
        use_rslora=file.get("use_rslora", False),
        use_dora=file.get("use_dora", False),
    )
