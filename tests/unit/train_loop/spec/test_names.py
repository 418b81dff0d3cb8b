"""Unknown fields: misspelt names, names of other tools, and fields to come."""

import random
import re
from collections.abc import Iterator
from difflib import SequenceMatcher
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from tests.support.builders.searches import seeds
from tests.support.builders.specs import TINY, code_spec, raw_spec
from train_loop.spec import InferJobSpec, JobSpec, SpecError, parse
from train_loop.spec.base import Only
from train_loop.spec.names import NAMES, TO_COME, field_paths, unknown_field
from train_loop.spec.names.spellings import SHARDING

PLACES = ("", "model", "data", "training", "strategy", "checkpoint", "scaling", "failure")
LEAVES = {path.rpartition(".")[2] for path in field_paths(JobSpec)}


def answers(place: str, name: str, value: Any = 1) -> dict[str, str]:
    """Return the problems of a valid spec with another field, by pointer."""
    raw = code_spec() if place == "code" else raw_spec()
    target = raw
    for part in filter(None, place.split(".")):
        target = target.setdefault(part, {})
    target[name] = value
    with pytest.raises(SpecError) as raised:
        parse(raw)
    return {problem.pointer: problem.message for problem in raised.value.problems}


@pytest.mark.parametrize(
    ("place", "name", "answer"),
    [
        ("training", "learing_rate", "no such field; did you mean learning_rate?"),
        ("", "learing_rate", "no such field; did you mean training.learning_rate?"),
        ("training", "beta", "no such field; did you mean adam_beta1 or adam_beta2?"),
        ("", "seedd", "no such field; did you mean data.seed or training.seed?"),
        ("strategy", "warmup_ratio", "no such field here; did you mean training.warmup_ratio?"),
        ("training", "warmup_ration", "no such field; did you mean warmup_ratio?"),
        ("strategy", "limit_all_gathers", "no such field; FSDP2 frees memory without waiting for the CPU, so that it "),
        ("model", "use_liger_kernel", "the use of Liger kernels is not supported yet; training.chunked_loss saves "),
        ("training", "save_steps", "no such field; use checkpoint.every_steps"),
        ("training", "fsdp", "no such field; use strategy.sharding_strategy and strategy.fsdp_size"),
        ("strategy", "cpu_offload", "no such field; use strategy.offload_policy"),
        ("training", "--learning-rate", "no such field here; did you mean training.learning_rate?"),
        ("", "seed", "no such field here; did you mean data.seed or training.seed?"),
        ("", "lora", "no such field here; did you mean model.lora?"),
        ("model.lora", "lora_alpha", "no such field; use model.lora.alpha"),
        ("model.lora", "layers_to_transform", "no such field; use model.lora.layers"),
        ("model", "peft_config", "no such field; use model.lora"),
        ("model.lora", "rank_pattern", "another rank for some modules is not supported yet; remove it"),
        ("training", "output_dir", "no such field; the service chooses the run directory; see run_dir of the job; "),
        ("strategy", "zzz", "no such field; check its spelling against GET /openapi.json, or remove it"),
    ],
)
def test_unknown_field_is_answered_with_what_it_may_mean(place: str, name: str, answer: str) -> None:
    (message,) = answers(place, name, {"r": 8}).values()
    assert message.startswith(answer)


def test_names_of_other_tools_lead_to_fields_that_exist() -> None:
    paths = {*field_paths(JobSpec), *field_paths(InferJobSpec)}
    for name, other in NAMES.items():
        for place in PLACES:
            assert unknown_field([*filter(None, [place]), name], JobSpec) == other.answer, (place, name)
        assert {*other.fields} <= paths, name
        assert bool(other.fields) is (other.kind == "field")
        assert other.meaning.strip("; .") == other.meaning, name
    absent = {name for name, other in NAMES.items() if other.kind == "absent"}
    # A group has betas; those of the whole run are two fields.
    assert LEAVES & ((NAMES.keys() - absent) | TO_COME) == {"betas"}, "expected names that no field has"


GUIDES = """
    backward_prefetch limit_all_gathers use_orig_params no_sync device_mapping cpu_offload sync_module_states
    auto_wrap_policy load_best_model_at_end lr epochs batch_size grad_accum buffer_dtype device_id param_init_fn
    mixed_precision mp_policy fsdp_sharding_strategy state_dict_type infer_batch_size strategy_args fsdp_version
    transformer_layer_cls size_based_auto_wrap_policy set_requires_gradient_sync broadcast_from_rank0 fully_shard
    set_modules_to_forward_prefetch nproc_per_node num_processes output_dir report_to optim save_steps unshard
"""


def test_table_has_the_names_of_the_guides() -> None:
    assert [name for name in re.findall(r"\w+", GUIDES) if name not in NAMES.keys() | LEAVES] == []
    assert len(NAMES) > 400
    assert [name for name in NAMES if name != name.lower().replace("-", "_")] == []


def test_misspelt_field_is_answered_with_the_field() -> None:
    paths = [path for path in field_paths(JobSpec) if path.count(".") == 1 and len(path.partition(".")[2]) > 5]
    for seed in range(seeds(200)):
        rng = random.Random(seed)
        place, _, name = rng.choice(paths).partition(".")
        spot = rng.randrange(1, len(name) - 1)
        typo = rng.choice(
            [name[:spot] + name[spot + 1 :], name[:spot] + name[spot + 1] + name[spot] + name[spot + 2 :], f"{name}s"]
        )
        if typo in LEAVES | NAMES.keys() | TO_COME:
            continue
        (message,) = answers(place, typo).values()
        (meant,) = re.findall(r"^no such field; did you mean (\w+)\?$", message)
        # adam_bet1a is as near to adam_beta2 as to adam_beta1.
        assert meant == name or nearness(typo, meant) == nearness(typo, name), typo


def test_misspelt_field_at_the_top_is_answered_with_the_least_nested_one() -> None:
    """A list of groups or sources repeats fields of its part, and a spec that lacks them needs the outer ones."""
    paths = [path for path in field_paths(JobSpec) if path.count(".") == 1 and len(path.partition(".")[2]) > 5]
    for path in paths:
        part, _, name = path.partition(".")
        typo = name[:2] + name[3:]
        if typo in LEAVES | NAMES.keys() | TO_COME:
            continue
        message = unknown_field([typo], JobSpec)
        meant = re.findall(r"[\w.]+\.(?=\w)\w+", message.partition("did you mean")[2])
        if any(one.endswith(f".{name}") for one in meant):
            assert f"{part}.{name}" in meant, message


def nearness(one: str, other: str) -> float:
    return SequenceMatcher(None, other, one).ratio()


@pytest.mark.parametrize("inside", [{"r": 8}, {}, True, "pixels", [1], "x" * 999])
def test_setting_to_come_has_one_answer_whatever_it_holds(inside: Any) -> None:
    ((pointer, message),) = answers("data.columns", "image", inside).items()
    assert pointer == "/data/columns/image"
    assert "is not supported yet" in message
    assert len(message) < 300


@pytest.mark.parametrize("dtype", ["BFLOAT16", "torch.bf16", 16])
@pytest.mark.parametrize(("place", "name"), [("model", "dtype"), ("strategy", "param_dtype")])
def test_invalid_dtype_has_one_error(dtype: Any, place: str, name: str) -> None:
    raw = raw_spec(model={"config": TINY, "dtype": "fp32"})
    del raw["model"]["dtype"]
    raw.setdefault(place, {})[name] = dtype
    with pytest.raises(SpecError) as raised:
        parse(raw)
    (problem,) = raised.value.problems
    assert problem.pointer == f"/{place}/{name}"
    assert "'bf16', 'fp16' or 'fp32'" in problem.message
    meant = {"BFLOAT16": "bf16", "torch.bf16": "bf16"}
    assert problem.message.partition("did you mean ")[2].rstrip("?") == meant.get(dtype, "")


def enumerated(annotation: Any, *place: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the places of a spec that have enumerated values, with the values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            # Settings to come have one answer, whatever they hold.
            if not any(isinstance(one, Only) for one in field.metadata):
                yield from enumerated(field.annotation, *place, name)
    elif get_origin(annotation) is Literal:
        yield place, get_args(annotation)
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from enumerated(part, *place)


PARENTS: dict[tuple[str, ...], dict[str, Any]] = {
    ("data", "eval"): {"path": "stdlib://"},
    ("checkpoint", "keep_best"): {"metric": "loss", "mode": "min"},
}
# These have their own rules, which name all their values.
OWN_RULES = {"async_save_ckpt", "offload_policy", "add_bos", "warmup_type", "decay_type", "threshold_mode"}
OWN_RULES |= {"target_modules"}
ENUMERATED = [(place, names) for place, names in enumerated(JobSpec) if place[-1] not in OWN_RULES]


@pytest.mark.parametrize(("place", "names"), ENUMERATED, ids=[".".join(place) for place, _ in ENUMERATED])
def test_misspelt_value_has_one_error_with_the_nearest_value(place: tuple[str, ...], names: tuple[str, ...]) -> None:
    for name in names:
        typos = {name + name[-1], name[0] + name[2:] if len(name) > 4 else f"{name}s", name.swapcase(), f"{name} "}
        for typo in typos - {one.lower() for one in SHARDING}:
            raw = raw_spec()
            target = raw
            for depth, part in enumerate(place[:-1], start=1):
                found = target.get(part)
                target[part] = found if isinstance(found, dict) else dict(PARENTS.get(place[:depth], {}))
                target = target[part]
            target[place[-1]] = typo
            with pytest.raises(SpecError) as raised:
                parse(raw)
            (problem,) = raised.value.problems
            assert problem.pointer == "/" + "/".join(place)
            assert problem.message.endswith(f"; did you mean {name}?"), (typo, problem.message)


@pytest.mark.parametrize(
    ("part", "name", "text", "form"),
    [
        ("data", "train", "/data/a.jsonl", '{path: "/data/a.jsonl"}'),
        ("data", "columns", "body", '{text: "body"}'),
        ("model", "freeze_module_prefix", "model.embed_tokens", '["model.embed_tokens"]'),
        ("model", "head", "sequence_classification", "{sequence_classification: {labels: 2}}"),
        ("model", "head", "regression", "{regression: {}}"),
    ],
)
def test_text_in_place_of_a_list_or_mapping_is_answered_with_its_form(
    part: str, name: str, text: str, form: str
) -> None:
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(**{part: {name: text}}))
    (problem,) = raised.value.problems
    assert problem.message.endswith(f"; write {form}")


@pytest.mark.parametrize("place", ["path", "tokenizer"])
@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("Qwen/Qwen3-0.6B", "run `hf download Qwen/Qwen3-0.6B --local-dir /models/Qwen3-0.6B` below a storage root, "),
        ("gpt2", "run `hf download gpt2 --local-dir /models/gpt2` below a storage root, and write file:///models/gpt2"),
        ("hf://Qwen/Qwen3-0.6B", "models are not downloaded from the Hugging Face Hub; run `hf download Qwen/"),
        ("https://hub.example/a/b", "run `hf download a/b --local-dir /models/b`"),
        ("./models/mine", "./models/mine is a relative path, but service and workers have different folders; write an"),
        ("~/models/mine/x", "is a relative path"),
    ],
)
def test_model_that_is_not_on_storage_is_answered_with_the_way_there(place: str, uri: str, rule: str) -> None:
    with pytest.raises(SpecError) as raised:
        parse(raw_spec(model={"path": "file:///models/a", "config": None} | {place: uri}))
    (problem,) = raised.value.problems
    assert problem.pointer == f"/model/{place}"
    assert rule in problem.message
