"""The configs beside exported weights of a causal language model, with the special tokens of the run's tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train_loop.errors import DataError
from train_loop.model.families.causal.heads import pools
from train_loop.model.families.family import ExportFacts, SpecialTokens
from train_loop.run_dir import write_durably
from train_loop.system.input_files import read_input


def write_configs(model: Any, config: Any, folder: Path, facts: ExportFacts) -> None:
    """Write config.json and generation_config.json, so that transformers can load the folder without the run."""
    config.architectures = [type(model).__name__]
    config.dtype = facts.dtype
    generation = generation_config(model, facts.home) if model.can_generate() else {}
    if facts.tokens is not None:
        align(config, generation, facts.tokens)
        end_also_at(generation, facts.ends)
        if pools(model) and getattr(config, "pad_token_id", None) is None:
            # transformers finds the last token of each row by it, and accepts no batches without.
            config.pad_token_id = facts.tokens.eos
    config.save_pretrained(folder)
    if model.can_generate():
        write_durably(folder / "generation_config.json", json.dumps(generation, indent=2) + "\n")


def end_also_at(generation: dict[str, Any], tokens: Sequence[int]) -> None:
    """Make generation also end at some tokens."""
    ends = _as_list(generation.get("eos_token_id"))
    if more := [token for token in tokens if token not in ends]:
        generation["eos_token_id"] = [*ends, *more]


def align(config: Any, generation: dict[str, Any], tokens: SpecialTokens) -> None:
    """Give config and generation config the tokenizer's special tokens by the rule of transformers' Trainer.

    Other EOS tokens of a list, and of the generation config, stay: each of them ends generation.
    """
    for name, token in (("eos_token_id", tokens.eos), ("bos_token_id", tokens.bos), ("pad_token_id", tokens.pad)):
        own, generated = getattr(config, name, None), _as_list(generation.get(name))
        if token is None or (token in _as_list(own) and token in generated):
            continue
        several = name == "eos_token_id"
        others = [one for one in own if one != token] if several and isinstance(own, list) else []
        setattr(config, name, [token, *others] if several and isinstance(own, list) else token)
        generation[name] = [token, *(one for one in generated if one != token)] if several else token


def generation_config(model: Any, home: Path | None) -> dict[str, Any]:
    """Return the fields of a folder's generation_config.json, or else the fields that follow from a model's config.

    Raises DataError for a file that is not a JSON object.
    """
    file = None if home is None else home / "generation_config.json"
    try:
        text = model.generation_config.to_json_string() if file is None or not file.exists() else read_input(file)
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}; correct it, and export again") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} holds a JSON {type(found).__name__}, not an object; correct it, and export again")
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
