"""Special tokens in exported configs equal those of transformers' Trainer; generation configs keep their fields."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig
from transformers.trainer_utils import align_special_tokens

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.specs import TINY
from train_loop.checkpoint.export.text_files import SpecialTokens, align, generation_config, special_tokens
from train_loop.errors import DataError
from train_loop.model.build import build_model
from train_loop.spec import ModelSpec

NAMES = ("eos_token_id", "bos_token_id", "pad_token_id")


def draw_id(draw: random.Random, *, several: bool) -> Any:
    one, other = draw.sample(range(5), 2)
    return draw.choice([None, one, [one, other], [one]] if several else [None, one])


@pytest.mark.parametrize("seed", range(100))
def test_special_tokens_are_aligned_as_by_transformers(seed: int) -> None:
    draw = random.Random(seed)
    own, generated = ({name: draw_id(draw, several=name == NAMES[0]) for name in NAMES} for _ in range(2))
    tokens = SpecialTokens(*(draw_id(draw, several=False) for _ in NAMES))
    config, generation = AutoConfig.for_model(**TINY | own), dict(generated)
    align(config, generation, tokens)
    theirs = SimpleNamespace(
        config=AutoConfig.for_model(**TINY | own), generation_config=GenerationConfig.from_dict(generated)
    )
    align_special_tokens(theirs, SimpleNamespace(**dict(zip(NAMES, tokens, strict=True))))
    assert {name: getattr(config, name) for name in NAMES} == {name: getattr(theirs.config, name) for name in NAMES}
    expected = {name: getattr(theirs.generation_config, name) for name in NAMES}
    assert {name: generation[name] for name in NAMES} == expected


def test_list_of_eos_tokens_is_kept() -> None:
    config, generation = AutoConfig.for_model(**TINY, eos_token_id=[0, 312]), {"eos_token_id": [0, 312]}
    align(config, generation, SpecialTokens(312, None, None))
    assert (config.eos_token_id, generation["eos_token_id"]) == ([0, 312], [0, 312])
    align(config, generation, SpecialTokens(7, None, None))
    assert (config.eos_token_id, generation["eos_token_id"]) == ([7, 0, 312], [7, 0, 312])


def test_generation_config_of_the_folder_keeps_all_fields_and_else_follows_from_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", eos_token_id=[0, 312])
    (folder / "generation_config.json").unlink()
    model = build_model(ModelSpec.model_validate({"path": str(folder)}))
    assert generation_config(model, folder)["eos_token_id"] == [0, 312]
    # transformers refuses to save a temperature without sampling, but folders have it.
    kept = {"temperature": 0.6, "do_sample": False, "eos_token_id": 5}
    (folder / "generation_config.json").write_text(json.dumps(kept))
    assert generation_config(model, folder) == kept


def test_tokenizer_that_cannot_be_loaded_ends_only_an_export_that_needs_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert special_tokens(tmp_path, required=True) == (256, None, None)
    (tmp_path / "tokenizer.json").write_text("{")
    assert special_tokens(tmp_path, required=False) is None
    with pytest.raises(DataError, match="cannot be loaded"):
        special_tokens(tmp_path, required=True)
