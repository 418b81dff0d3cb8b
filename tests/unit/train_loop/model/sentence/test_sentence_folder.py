"""Folders of sentence-transformers: their rules, contradictions with a spec, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModel

from tests.support.builders.folders import write_tokenizer
from tests.support.builders.specs import TINY, infer_spec, may_read, raw_spec
from tests.support.families.families import small
from tests.support.ranks.peft_folders import write_parts
from tests.support.sentence_folders import write_sentence_files
from train_loop.errors import ModelError
from train_loop.model.families.causal.embeddings import embedding_of, write_sentence_configs
from train_loop.model.families.choose import family_of
from train_loop.model.sentence.folder import read_sentence_rules
from train_loop.model.sentence.rule import EmbeddingRule, embedding_rule, prompt_note, rule_problems
from train_loop.preflight.model import check_model
from train_loop.run import check_embedding
from train_loop.run_dir import RunDir
from train_loop.spec import JobSpec, parse, parse_any

ANCHORS = {"columns": {"anchor": "a", "positive": "p"}, "packing": False}


def write_encoder(folder: Path) -> None:
    """Write a BERT with random weights, and a tokenizer of bytes."""
    AutoModel.from_config(AutoConfig.for_model(**small("bert") | {"vocab_size": 300})).save_pretrained(folder)
    write_tokenizer(folder)


def job(folder: Path, *, trains: bool = False, length: int = 32, **head: Any) -> JobSpec:
    """Return a job that embeds texts with a folder's model."""
    model = {"path": str(folder), "config": None, "head": {"embedding": head | ({"group": 1} if trains else {})}}
    if trains:
        return parse(raw_spec(model=model, data=ANCHORS | {"sequence_length": length}))
    if not head:
        del model["head"]
    data = {"columns": {"text": "t"}, "sequence_length": length}
    return parse_any(infer_spec(model=model, data=data, infer={"output": "embeddings"})).run


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "mean", "lasttoken"])
def test_rule_of_a_folder_is_that_of_inference_and_training(
    tmp_path: Path, pooling: str, normalize: bool, new: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small("bert")))
    write_sentence_files(tmp_path, pooling, *["Normalize"] * normalize, new=new)
    expected = EmbeddingRule("last_token" if pooling == "lasttoken" else pooling, normalize)  # type: ignore[arg-type]
    for spec in (job(tmp_path), job(tmp_path, trains=True)):
        model = family_of(spec).build(spec.model).model
        assert embedding_of(model) == expected
        export = tmp_path / "export"
        export.mkdir(exist_ok=True)
        write_sentence_configs(model, export)
        assert embedding_rule(job(export).model) == expected, "an export states the rule of its run"


def test_spec_gives_what_no_folder_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert embedding_rule(job(tmp_path).model) == EmbeddingRule("last_token", normalize=True)
    assert embedding_rule(job(tmp_path, pooling="mean").model) == EmbeddingRule("mean", normalize=True)
    assert [*rule_problems(job(tmp_path, pooling="mean"))] == []


def test_adapters_state_the_rule_before_their_base(tmp_path: Path) -> None:
    write_sentence_files(tmp_path / "base", "mean")
    write_parts(tmp_path / "adapters")
    model = job(tmp_path / "base").model.model_copy(update={"adapter": str(tmp_path / "adapters")})
    assert embedding_rule(model) == EmbeddingRule("mean", normalize=False)
    write_sentence_files(tmp_path / "adapters", "lasttoken", "Normalize")
    assert embedding_rule(model) == EmbeddingRule("last_token", normalize=True)


@pytest.mark.parametrize(
    ("head", "length", "problems"),
    [
        ({"pooling": "mean", "normalize": True}, 16, []),
        ({"pooling": "cls"}, 16, ["pooling=cls contradicts FOLDER, whose modules.json has mean; remove pooling from"]),
        ({"normalize": False}, 16, ["normalize=false contradicts FOLDER, whose modules.json has true; remove"]),
        ({}, 17, ["sequence_length=17 is more than the 16 tokens to which FOLDER truncates texts (max_seq_length"]),
    ],
)
@pytest.mark.parametrize("trains", [False, True])
def test_contradiction_between_folder_and_spec_is_refused(
    tmp_path: Path, head: Any, length: int, problems: list[str], trains: bool
) -> None:
    write_sentence_files(tmp_path, "mean", "Normalize", sentence_bert_config={"max_seq_length": 16})
    spec = job(tmp_path, trains=trains, length=length, **head)
    found = [one.message.replace(str(tmp_path), "FOLDER") for one in rule_problems(spec)]
    assert len(found) == len(problems)
    assert all(message.startswith(begin) for message, begin in zip(found, problems, strict=True))


def test_contradictions_are_refused_by_the_plan_and_without_a_service(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    write_sentence_files(tmp_path, "mean")
    spec = job(tmp_path, pooling="cls", normalize=False)
    problems = check_model(spec, may_read(f"file://{tmp_path}"))[1]
    assert [one.pointer for one in problems if "contradicts" in one.message] == ["/model/head/embedding/pooling"]
    with pytest.raises(ValueError, match=r"pooling=cls contradicts .*modules\.json has mean"):
        check_embedding(spec, RunDir(tmp_path / "run"))


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"more": ["Dense"]},
        r"modules.json has the module 'Dense' as number 2, and only Transformer, Pooling and then Norm",
    ),
    ({"more": ["Normalize", "Dense"]}, r"has the module 'Dense' as number 3"),
    ({"pooling": "max"}, r"config.json has the pooling max, and only one of lasttoken, mean, cls is supported"),
    ({"pooling": "weightedmean", "new": True}, r"has the pooling weightedmean"),
    ({"pooling": ["cls", "mean"]}, r"has the pooling (cls and mean|mean and cls)"),
    ({"pooling": ["cls", "max"], "new": True}, r"has the pooling cls and max"),
    (
        {"config_sentence_transformers": {"prompts": {"query": "query: "}, "default_prompt_name": "query"}},
        r'embeds texts with default_prompt_name="query", a prompt before each text, which is not supported',
    ),
    ({"config_sentence_transformers": {"truncate_dim": 8}}, r"embeds texts with truncate_dim=8"),
    ({"config_sentence_transformers": {"model_type": "SparseEncoder"}}, r'with model_type="SparseEncoder"'),
    ({"sentence_bert_config": {"transformer_task": "fill-mask"}}, r'with transformer_task="fill-mask"'),
    ({"sentence_bert_config": {"config_kwargs": {"is_causal": False}}}, r"with config_kwargs.is_causal=false"),
    ({"sentence_bert_config": {"processing_kwargs": {"text": {"max_length": 8}}}}, r"with processing_kwargs="),
    ({"sentence_bert_config": {"query_length": 8}}, r"with query_length=8"),
    ({"sentence_bert_config": {"never_seen": 1}}, r"with never_seen=1"),
    (
        {"sentence_bert_config": {"modality_config": {"text": {"method": "get_text_features"}}}},
        r'with modality_config.text=\{"method": "get_text_features"\}',
    ),
]


@pytest.mark.parametrize(("parts", "message"), BAD)
def test_folder_that_embeds_in_another_way_is_refused(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    given = {"pooling": "mean"} | parts
    write_sentence_files(tmp_path, given.pop("pooling"), *given.pop("more", ()), **given)
    with pytest.raises(ModelError, match=message):
        embedding_rule(job(tmp_path).model)
    with pytest.raises(ModelError, match=message):
        list(rule_problems(job(tmp_path, pooling="mean", normalize=True)))


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        ({"max_seq_length": 16, "do_lower_case": False}, 16),
        ({"max_seq_length": None, "tokenizer_args": {"model_max_length": 8}}, 8),
        (
            {
                "transformer_task": "feature-extraction",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "module_output_name": "token_embeddings",
            },
            24,
        ),
        ({"model_args": {"trust_remote_code": False, "torch_dtype": "float16"}}, 24),
    ],
)
def test_settings_without_effect_are_accepted_and_the_limit_is_read(
    tmp_path: Path, settings: Any, longest: int
) -> None:
    write_sentence_files(tmp_path, "mean", sentence_bert_config=settings, tokenizer_config={"model_max_length": 24})
    found = read_sentence_rules(tmp_path)
    assert found is not None
    assert found.longest == longest


def test_parts_of_a_folder_are_refused_unless_the_spec_states_the_rule(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    with pytest.raises(ModelError, match=r"is a part of a folder of sentence-transformers, and has no modules\.json"):
        embedding_rule(job(tmp_path).model)
    whole = job(tmp_path, pooling="mean", normalize=True)
    assert embedding_rule(whole.model) == EmbeddingRule("mean", normalize=True)
    assert [*rule_problems(whole)] == []


def test_paths_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    write_sentence_files(tmp_path, "mean")
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[1]["path"] = "../1_Pooling"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"names '\.\./1_Pooling', which is not a folder in it"):
        read_sentence_rules(tmp_path)
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"names '\.\./1_Pooling'|in '0_Transformer', as old versions wrote it"):
        read_sentence_rules(tmp_path)


def test_prompts_of_some_texts_are_named_in_a_warning(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": ""}
    write_sentence_files(tmp_path, "mean", config_sentence_transformers={"prompts": prompts})
    note = prompt_note(job(tmp_path).model)
    assert note == (
        f"{tmp_path} has prompts (query) for some texts, and none is put before the rows; write them into the rows "
        "that need them"
    )


def test_lower_case_is_refused_with_a_tokenizer_that_keeps_capitals(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    write_sentence_files(tmp_path, "mean", sentence_bert_config={"do_lower_case": True})
    problems = check_model(job(tmp_path, length=8), may_read(f"file://{tmp_path}"))[1]
    assert any("embeds texts in lower case (do_lower_case), and its tokenizer keeps" in one.message for one in problems)
