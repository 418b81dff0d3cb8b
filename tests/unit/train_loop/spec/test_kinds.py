"""Specs of several kinds: the union by `kind`, and the settings that a job of kind infer refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders.specs import infer_spec, raw_spec, spec
from train_loop.spec import (
    InferJobSpec,
    JobSpec,
    ScalingSpec,
    SpecError,
    dump,
    load,
    override,
    parse_any,
    parse_any_text,
)


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as raised:
        parse_any(raw)
    return {one.pointer: one.message for one in raised.value.problems}


def test_spec_without_kind_is_a_training_job_with_the_same_dump_as_before() -> None:
    assert isinstance(parse_any(raw_spec()), JobSpec)
    written = json.loads(dump(spec()))
    # Digests of stored specs depend on the order of fields.
    assert list(written)[:5] == ["name", "kind", "project", "priority", "labels"]
    assert list(written)[5:] == [
        *("code", "model", "data", "training", "infer", "strategy", "checkpoint", "scaling", "failure")
    ]
    assert (written["kind"], written["infer"]) == ("train", None)


def test_kind_infer_round_trips() -> None:
    job = parse_any(infer_spec(infer={"output": "perplexity", "batch_size": 2}))
    assert isinstance(job, InferJobSpec)
    assert load(dump(job)) == job
    assert parse_any(infer_spec(infer={"output": "perplexity", "infer_batch_size": 2})) == job
    assert parse_any_text("name: x\nkind: infer\nmodel: {path: /m}\ndata: {train: {path: /d}}\n").kind == "infer"


def test_examples_of_inference_are_valid() -> None:
    for name, output in (("infer", "logprobs"), ("generate", "generate")):
        job = parse_any_text(Path(f"examples/{name}.yaml").read_text())
        assert isinstance(job, InferJobSpec)
        assert job.infer.output == output


def test_unknown_kind_is_refused() -> None:
    for kind, remedy in (("serve", "choose train or infer"), ("inferr", "did you mean infer?")):
        assert problems(infer_spec() | {"kind": kind}) == {"/kind": f"'{kind}' is not a kind of job; {remedy}"}


def test_run_has_model_rows_and_mesh_of_the_job() -> None:
    job = parse_any(infer_spec(model={"dtype": "bf16"}, infer={"batch_size": 3}, scaling={"num_workers": 2}))
    run = job.run
    assert (run.model.master_dtype, run.model.dtype, run.strategy.param_dtype) == ("bf16", "bf16", "bf16")
    assert (run.data.packing, run.data.shuffle, run.data.on_long_rows) == (False, False, "fail")
    assert (run.training.per_device_train_batch_size, run.scaling.world) == (3, 2)
    assert not run.model.ends_text, "text gets no EOS that transformers would not add"


def test_settings_of_rolls_inference_are_accepted() -> None:
    job = parse_any(
        infer_spec(
            model={"disable_gradient_checkpointing": True, "dtype": "bf16"},
            infer={"infer_batch_size": 1},
            strategy={"fsdp_size": 4, "param_dtype": "bf16", "reduce_dtype": "float32", "reshard_after_forward": True}
            | {"offload_policy": False, "apply_expert_patch": True},
            scaling={"num_workers": 8},
        )
    )
    assert (job.kind, job.strategy.fsdp_size, job.run.model.gradient_checkpointing) == ("infer", 4, "none")


def test_override_keeps_the_kind() -> None:
    job = parse_any(infer_spec())
    assert override(job, {"infer": {"batch_size": 8}}).run.training.per_device_train_batch_size == 8
    with pytest.raises(SpecError, match="training belongs to training jobs"):
        override(job, {"training": {"learning_rate": 1.0}})
    with pytest.raises(SpecError):
        override(spec(), {"kind": "infer"})


def test_results_do_not_depend_on_the_size() -> None:
    one, two = (parse_any(infer_spec(infer={"batch_size": n}, scaling={"num_workers": n})) for n in (1, 2))
    assert one != two
    assert one.at_any_size() == two.at_any_size()
    assert one.scaled(ScalingSpec(num_workers=2)).scaling == two.scaling


MESSAGES = {"columns": {"messages": "m"}}


def generates(**generation: Any) -> dict[str, Any]:
    return {"infer": {"output": "generate", "generation": generation}}


@pytest.mark.parametrize(
    ("parts", "pointer", "message"),
    [
        ({"infer": {"generation": {"stop": ["\n"]}}}, "/infer", "set output: generate, or remove it"),
        (generates(temperature=0.0, top_k=5), "/infer/generation", "top_k=5 has no effect at temperature=0"),
        (generates(stop=["\n"]), "", "columns.input_ids names rows that are tokenised already; use stop_tokens"),
        (generates() | {"model": {"attn_implementation": "flex_attention"}}, "", "choose sdpa or auto"),
        ({"infer": {"path": "/out"}}, "/infer/path", "is not supported yet; choose null"),
        ({"infer": {"infer_batch_size": 2, "batch_size": 2}}, "/infer", "are the same field; remove one"),
        ({"data": {"packing": True}}, "/data/packing", "choose false"),
        ({"data": {"on_long_rows": "split"}}, "/data/on_long_rows", "choose"),
        ({"data": {"columns": {"prompt": "p", "response": "r"}}}, "/data", "columns.prompt="),
        ({"data": MESSAGES, "infer": {"output": "embeddings"}}, "", "columns.messages names conversations"),
        (generates() | {"data": MESSAGES | {"on_long_rows": "truncate"}}, "", "choose truncate_left or fail"),
        ({"data": {"columns": {"input_ids": "row"}}}, "/data", "rename it in the files"),
        ({"model": {"gradient_checkpointing": "selective"}}, "/model", "gradient_checkpointing="),
        ({"model": {"dtype": "fp16"}}, "/model", "choose bf16 or fp32"),
        ({"model": {"head": "reward"}}, "", "model.head is not supported"),
        ({"model": {"head": "embedding"}}, "", "choose output: embeddings"),
        (
            {"infer": {"output": "embeddings"}, "strategy": {"tp_size": 2}},
            "",
            "strategy.tp_size=2 is not supported with",
        ),
        (
            {"strategy": {"tp_size": 2, "sequence_parallel": True}},
            "",
            "strategy.sequence_parallel=true is not supported",
        ),
        ({"strategy": {"tp_size": 2, "reshard_after_forward": 2}}, "", "does not support reshard_after_forward=2"),
        ({"strategy": {"reduce_dtype": "bf16"}}, "", "strategy.reduce_dtype="),
        ({"training": {"learning_rate": 1.0}}, "/training", "training belongs to training jobs"),
        ({"checkpoint": {}}, "/checkpoint", "checkpoint belongs to training jobs"),
    ],
)
def test_option_without_effect_is_refused_by_name(parts: dict[str, Any], pointer: str, message: str) -> None:
    assert message in problems(infer_spec(**parts))[pointer]


def test_infer_section_of_a_training_job_is_refused() -> None:
    raw = raw_spec() | {"infer": {"output": "logprobs"}}
    assert problems(raw) == {"/infer": "infer goes with kind: infer; set kind: infer, or remove infer"}
