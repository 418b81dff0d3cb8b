"""A config with a mistake is rejected quickly, in words of the config and not of a library's code."""

import random
import re
import time
from typing import Any

import pytest
from transformers import AutoConfig

from tests.support.builders.broken_configs import broken
from tests.support.builders.searches import drawn, seeds
from tests.support.builders.specs import TINY, may_read, raw_spec
from tests.support.families.families import FAMILIES, small
from train_loop.preflight.model import check_model
from train_loop.spec import Problem, parse

INTERNAL = re.compile(
    r"NoneType|has no attribute|operand|\bargument|subscriptable|\w+Error\b|<class|\.py\b|validator|iterable|mat1|"
    r"self\.|unpack|einsum|not supported between|not divisible by|size of tensor|out of range"
)
"""Words of Python's and torch's own errors."""
GEMMA_3N = {
    name: value
    for name, value in AutoConfig.for_model("gemma3n_text").to_dict().items()
    if name in {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"}
    or name in {"num_key_value_heads", "intermediate_size", "head_dim"}
}


def problems_of(config: dict[str, Any], **parts: Any) -> list[Problem]:
    return check_model(parse(raw_spec(model={"config": config}, **parts)), may_read())[1]


CANNOT = r"not a valid causal language model: transformers [\d.]+ cannot build it with "


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "ministral"}, CANNOT + "head_dim=None; correct"),
        ({"model_type": "nemotron"}, CANNOT + "num_key_value_heads=None; correct"),
        ({"model_type": "cohere_compass_text"}, CANNOT + ".*rope_parameters={}; correct"),
        (TINY | {"hidden_act": "gleu"}, CANNOT + ".*hidden_act='gleu'; correct"),
        (TINY | {"pad_token_id": 999}, CANNOT + "pad_token_id=999 and vocab_size=384; correct"),
        (TINY | {"rope_parameters": {"rope_type": "yarnn"}}, CANNOT + ".*rope_parameters={'rope_type': 'yarnn'"),
        (
            TINY | {"rope_parameters": {"rope_type": "yarn"}},
            "language model: Missing required keys in `rope_parameters`",
        ),
        (TINY | {"layer_types": ["full_attention"]}, r"must be equal to the number of `layer_types` \(1\); correct"),
        (TINY | {"num_key_value_heads": [1]}, r"with value \[1\] doesn't match any type in \(int, null\); correct"),
        (
            TINY | {"num_attention_heads": 3},
            "has 3 attention heads and 2 kv heads; the first must be a multiple",
        ),
        ({"model_type": "dbrx"}, "^not supported yet: model_type=dbrx, whose experts do not have transformers' common"),
        ({"model_type": "lfm2_moe"}, CANNOT + ".*layer_types=None; correct"),
        (
            small("helium") | {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 4},
            "its sizes do not fit each other: hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=4",
        ),
        (small("prophetnet") | {"add_cross_attention": False}, "not a causal model; choose another model$"),
        (
            small("moshi") | {"sliding_window": 8},
            "such as no sliding window.*choose a data.sequence_length within its sliding window, or another",
        ),
    ],
)
def test_mistake_is_named_by_the_fields_of_the_config(config: dict[str, Any], reason: str) -> None:
    (problem,) = problems_of(config)
    assert problem.pointer == "/model/config"
    assert re.search(reason, problem.message)
    assert not INTERNAL.search(problem.message)


@pytest.mark.parametrize(
    ("config", "length"),
    # Windows that hold whole sequences do not matter.
    [(GEMMA_3N, 32), (small("moshi"), 8), (small("doge") | {"keep_window_size": 8}, 8)],
)
def test_right_model_is_accepted_quickly(config: dict[str, Any], length: int) -> None:
    started = time.process_time()
    assert problems_of(config, data={"sequence_length": length}) == []
    # Half of the CPU time that a check may take by default: slow machines need up to 5 s.
    assert time.process_time() - started < 15


def test_doge_is_not_trained_beyond_its_window() -> None:
    """A new Doge has equal scores: which tokens beyond the window it keeps depends on the row."""
    (problem,) = problems_of(small("doge") | {"keep_window_size": 8}, data={"sequence_length": 16})
    assert problem.pointer == "/data/sequence_length"
    assert "choose at most 8, or a larger keep_window_size" in problem.message


@pytest.mark.parametrize(
    "family", drawn([one for one in FAMILIES if "bert" in one or one in ("electra", "ernie", "rembert")], 4)
)
def test_advice_to_make_an_encoder_a_decoder_helps(family: str) -> None:
    config = small(family)
    if any("is_decoder: true" in problem.message for problem in problems_of(config)):
        assert all(one.pointer != "/model/config" for one in problems_of(config | {"is_decoder": True}))


@pytest.mark.parametrize("seed", range(seeds(12, more=2000)))
def test_any_mistake_gives_an_answer_in_words_of_the_config(seed: int) -> None:
    raw = raw_spec(model={"config": broken(random.Random(seed))})
    messages = [problem.message for problem in check_model(parse(raw), may_read())[1]]
    assert [message for message in messages if INTERNAL.search(message)] == []
