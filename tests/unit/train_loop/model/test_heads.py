"""Heads of labels: the settings that go with them, their rows, and the models that have them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from tests.support.builders.folders import write_model, write_tokenizer
from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.data.dataset import IGNORE, Dataset
from train_loop.data.order import PADDING
from train_loop.data.prepare.encode import BadRow, TextRules, encode_rows
from train_loop.data.prepare.packing import one_per_sample
from train_loop.data.prepare.rows import Row
from train_loop.data.shards import write_part
from train_loop.data.stream.local import read_rows
from train_loop.errors import DataError, ModelError
from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.folder import model_shape
from train_loop.plan import plan_job
from train_loop.preflight.checks import answer
from train_loop.preflight.model import check_model
from train_loop.preflight.preview import preview_source
from train_loop.spec import ColumnsSpec, JobSpec, SpecError, parse

CLASSES = {"sequence_classification": {"labels": 3}}
TAGS = {"token_classification": {"labels": 3}}
NAMES = ["bad", "fair", "good"]
NAMED = {"sequence_classification": {"labels": 3, "names": NAMES}}
NAMED_TAGS = {"token_classification": {"labels": 3, "names": NAMES}}
BEST = {
    "checkpoint": {"keep_best": {"metric": "eval_f1", "mode": "max"}, "every_steps": 2},
    "training": {"eval_steps": 2},
}
LABELLED = {"columns": {"text": "text", "label": "label"}, "packing": False}
TAGGED = {"columns": {"input_ids": "ids", "labels": "tags"}}


def job_of(head: Any, data: dict[str, Any], **parts: Any) -> JobSpec:
    model = {"head": head} | parts.pop("model", {})
    return spec(model=model, data=data, **parts)


@pytest.mark.parametrize(
    ("head", "data", "parts", "message"),
    [
        ("reward", {}, {}, "needs columns.chosen and columns.rejected"),
        ("embedding", {}, {}, "needs columns.anchor and columns.positive"),
        ({}, {}, {}, "head names exactly one of"),
        (CLASSES | TAGS, {}, {}, "head names exactly one of"),
        ({"regression": {"labels": 2}}, {}, {}, "/model/head/regression/labels: input should be less than or equal"),
        (CLASSES, {}, {}, "needs columns.label"),
        (CLASSES, LABELLED | {"packing": True}, {}, "one document per row"),
        (CLASSES, LABELLED | {"on_long_rows": "split"}, {}, "cannot be split"),
        (CLASSES, LABELLED, {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}, "ulysses_size: 1"),
        (CLASSES, LABELLED, {"training": {"chunked_loss": True}}, "chunked_loss: true has no meaning"),
        (CLASSES, LABELLED, {"training": {"z_loss": 0.1}}, "z_loss has no meaning"),
        ({"regression": {}}, LABELLED, {"training": {"label_smoothing_factor": 0.1}}, "has no meaning"),
        (CLASSES, LABELLED, {"training": {"reproducible": "any_size", "global_batch_size": 8}}, "same bits"),
        (TAGS, {}, {}, "a class per token"),
        (
            "causal_lm",
            {"eval": {"path": "stdlib://*.py"}},
            BEST,
            "has no eval_f1 for keep_best.metric; choose eval_loss or eval_perplexity",
        ),
        ({"sequence_classification": {"labels": 2, "names": NAMES}}, LABELLED, {}, "3 names for labels=2; give one"),
        ({"token_classification": {"labels": 2, "names": ["a", "a"]}}, TAGGED, {}, "'a' is the name of two classes"),
        ("causal_lm", LABELLED, {}, "columns.label goes with model.head"),
        ("causal_lm", {"columns": {"messages": "m", "label": "label"}}, {}, "columns.label goes with columns.text"),
    ],
)
def test_setting_that_a_head_does_not_have_is_refused(head: Any, data: Any, parts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        job_of(head, data, **parts)


@pytest.mark.parametrize(
    ("head", "label", "reason"),
    [
        (CLASSES, 2, None),
        (CLASSES, 1.0, None),
        (CLASSES, 3, "column 'label' holds 3 where a whole number from 0 to 2 is needed"),
        (CLASSES, -1, "column 'label' holds -1"),
        (CLASSES, 0.5, "column 'label' holds 0.5"),
        (CLASSES, True, "column 'label' holds True"),
        (CLASSES, None, "column 'label' holds null"),
        (CLASSES, "good", "column 'label' holds 'good' where a whole number is needed, because model.head gives"),
        (NAMED, 2, None),
        (NAMED, "good", None),
        (NAMED, 3, "column 'label' holds 3 where a whole number from 0 to 2 is needed"),
        (NAMED, "Good", "column 'label' holds 'Good', which is none of the names in model.head: bad, fair, good"),
        ({"regression": {}}, -0.5, None),
        ({"regression": {}}, float("nan"), "column 'label' holds nan where a finite number is needed"),
        ({"regression": {}}, 1e39, "a finite number is needed"),
    ],
)
def test_label_outside_its_range_is_a_bad_row(tmp_path: Path, head: Any, label: Any, reason: str | None) -> None:
    write_tokenizer(tmp_path)
    job = job_of(head, LABELLED)
    rows, columns = [Row(0, {"text": "ab", "label": label})], job.data.columns
    (found,) = encode_rows(rows, columns, vocab=300, rules=TextRules(str(tmp_path)), head=job.model.label_head)
    if reason is None:
        assert not isinstance(found, BadRow)
        # Without EOS, as transformers' tokenizers read text.
        assert (len(found.input_ids), found.target) == (2, NAMES.index(label) if label in NAMES else label)
    else:
        assert isinstance(found, BadRow)
        assert reason in found.reason


def test_text_without_tokens_has_no_place_for_a_label(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    job = job_of(CLASSES, LABELLED)
    rows = [Row(0, {"text": "", "label": 1}), Row(1, {"text": "a", "label": 1})]
    head, rules = job.model.label_head, TextRules(str(tmp_path))
    first, second = encode_rows(rows, job.data.columns, vocab=300, rules=rules, head=head)
    assert isinstance(first, BadRow)
    assert "no tokens" in first.reason
    assert not isinstance(second, BadRow)


@pytest.mark.parametrize(
    ("head", "tags", "reason"),
    [
        (TAGS, [IGNORE, 2], None),
        (TAGS, [0, 3], "column 'tags' holds 3 at position 1, which is not a class from 0 to 2, nor -100"),
        (TAGS, [0, -1], "column 'tags' holds -1 at position 1"),
        (TAGS, [0], "2 tokens and 1 labels; they must be aligned"),
        (TAGS, [0, 1.0], "column 'tags' holds 1.0 at position 1, where a whole number is needed"),
        (TAGS, [0, None], "column 'tags' holds null at position 1"),
        (TAGS, None, "column 'tags' holds null where a list of whole numbers is needed"),
        (TAGS, 2, "column 'tags' holds 2 where a list of whole numbers is needed"),
        (TAGS, [IGNORE, IGNORE], None),
        (TAGS, ["bad", "good"], "column 'tags' holds 'bad' at position 0 where a whole number is needed, because"),
        (NAMED_TAGS, [IGNORE, "good"], None),
        (NAMED_TAGS, ["bad", "ugly"], "column 'tags' holds 'ugly' at position 1, which is none of the names"),
        (NAMED_TAGS, ["bad", None], "column 'tags' holds null at position 1"),
    ],
)
def test_class_of_a_token_outside_its_range_is_a_bad_row(head: Any, tags: Any, reason: str | None) -> None:
    rows = [Row(0, {"ids": [200, 5], "tags": tags})]
    columns = ColumnsSpec(input_ids="ids", labels="tags")
    (found,) = encode_rows(rows, columns, vocab=300, head=job_of(head, TAGGED).model.label_head)
    if reason is None:
        assert not isinstance(found, BadRow)
        assert found.labels is not None
        assert found.labels.tolist() == [IGNORE if tag == IGNORE else 2 for tag in tags]
    else:
        assert isinstance(found, BadRow)
        assert reason in found.reason


def test_bad_labels_are_named_by_file_and_line_and_labels_beyond_a_sample_go_with_their_tokens(tmp_path: Path) -> None:
    lines = [{"ids": [1, 2, 3], "tags": ["bad", IGNORE, "good"]}, {"ids": [4, 5], "tags": [IGNORE, "ugly"]}]
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    data = TAGGED | {"train": {"path": str(file)}, "sequence_length": 2, "on_long_rows": "truncate", "packing": False}
    job = job_of(NAMED_TAGS, data)
    with pytest.raises(DataError, match=r"d\.jsonl, line 2: column 'tags' holds 'ugly' at position 1, which is none"):
        preview_source(job, job.data.sources[0])
    file.write_text(json.dumps(lines[0]))
    found = preview_source(job, job.data.sources[0])
    assert found is not None
    assert found.notes == (
        f"{file}: 1 of the first 1 rows are longer than sequence_length=2 and are truncated to it, "
        "so their ends are not trained; see on_long_rows",
        f"{file}: 1 of the first 1 rows have no token that is trained, the first because column 'tags' has no label "
        "but -100",
    )


def test_labels_survive_prepared_files(tmp_path: Path) -> None:
    rows = [Row(n, {"ids": list(range(n + 1)), "label": n / 2}) for n in range(3)]
    columns, head = ColumnsSpec(input_ids="ids", label="label"), job_of({"regression": {}}, LABELLED).model.label_head
    documents = [one for one in encode_rows(rows, columns, vocab=9, head=head) if not isinstance(one, BadRow)]
    part = write_part(one_per_sample(documents, 4), tmp_path)
    found = read_rows(Dataset(fingerprint="x", parts=(part,), sequence_length=4), np.array([2, PADDING, 1]))
    assert found.targets.tolist() == [1.0, 0.0, 0.5]
    assert found.lengths.tolist() == [3, 0, 2]


def test_preflight_accepts_a_folder_of_a_language_model_and_names_the_first_bad_label(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    pq.write_table(pa.table({"text": ["a", "b"], "label": [2, 3]}), tmp_path / "d.parquet")
    raw = raw_spec(
        model={"config": None, "path": str(tmp_path / "model"), "head": CLASSES},
        data={"train": {"path": str(tmp_path / "d.parquet")}} | LABELLED,
    )
    question = {"spec": raw, "read_policy": may_read(str(tmp_path)).model_dump(), "parent": None}
    (problem,) = answer(question)["problems"]
    assert problem["pointer"] == "/data/train/path"
    assert "row 1: column 'label' holds 3 where a whole number from 0 to 2 is needed" in problem["message"]


def test_plan_has_the_logits_of_labels() -> None:
    job = job_of(CLASSES, LABELLED, training={"per_device_train_batch_size": 4})
    shape = model_shape(job.model)
    terms = {term.name: term for term in plan_job(job, shape).memory}
    assert terms["logits"].bytes == 4 * 3 * 12
    assert shape.parameters == sum(one.numel() for one in CAUSAL.build(job.model).model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2"])
def test_scores_are_those_of_transformers_for_any_padding_token(family: str) -> None:
    job = job_of(CLASSES, LABELLED, model={"config": TINY | {"model_type": family, "pad_token_id": 7}})
    anatomy = CAUSAL.build(job.model)
    model = CAUSAL.build(job.model).model
    materialise(model, anatomy, seed=0, device=torch.device("cpu"))
    ids, lengths = torch.randint(8, 300, (3, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([9, 2, 5])
    ids[torch.arange(9) >= lengths[:, None]] = 7
    columns = {"input_ids": ids, "position_ids": torch.arange(9).expand(3, 9), "length": lengths}
    with torch.no_grad():
        found = CAUSAL.call(model.eval(), columns, CAUSAL.arguments(model, columns))
        expected = type(model).forward(model, input_ids=ids, attention_mask=(ids != 7).long()).logits
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "codegen"}, "has none for codegen; choose another family"),
        ({"model_type": "bert", "is_decoder": True}, "its scores of a row are not those of the row's last token"),
    ],
)
def test_family_without_a_head_that_reads_the_last_token_is_refused(config: dict[str, Any], message: str) -> None:
    raw = raw_spec(model={"config": small(config["model_type"]) | config, "head": CLASSES}, data=LABELLED)
    (problem, *_) = check_model(parse(raw), may_read())[1]
    assert message in problem.message


@pytest.mark.parametrize(
    ("parts", "pointer", "reason"),
    [
        ({"data": TAGGED | {"packing": True}}, "/data/packing", "attends to the whole row"),
        (
            {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}},
            "/strategy/ulysses_size",
            "attends to the whole row",
        ),
        (
            {"strategy": {"tp_size": 2}, "scaling": {"num_workers": 2}},
            "/strategy/tp_size",
            "tp_size=2 needs a plan of how ranks share layers, which BertForTokenClassification lacks",
        ),
    ],
)
def test_encoder_with_labels_has_whole_rows_and_layers(parts: dict[str, Any], pointer: str, reason: str) -> None:
    base: dict[str, Any] = {"model": {"config": small("bert"), "head": TAGS}, "data": TAGGED | {"packing": False}}
    raw = raw_spec(**base | parts)
    (problem, *_) = check_model(parse(raw), may_read())[1]
    assert (problem.pointer, reason in problem.message) == (pointer, True)


def test_text_with_labels_needs_no_eos(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[CLS]": 0, "[SEP]": 1, "[PAD]": 2, "good": 3}, unk_token="[PAD]"))
    words.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(tmp_path)
    model = {"config": small("bert") | {"vocab_size": 4}, "tokenizer": str(tmp_path)}
    job = job_of(CLASSES, LABELLED, model=model)
    rules = TextRules.of(job.data, tmp_path, plain=not job.model.ends_text)
    rows = [Row(0, {"text": "good", "label": 1})]
    (found,) = encode_rows(rows, job.data.columns, vocab=4, rules=rules, head=job.model.label_head)
    assert not isinstance(found, BadRow)
    assert found.input_ids.tolist() == [0, 3, 1]


def test_folder_with_a_head_is_continued_unless_its_labels_differ(tmp_path: Path) -> None:
    job, other = (job_of({"sequence_classification": {"labels": n}}, LABELLED) for n in (3, 4))
    anatomy = CAUSAL.build(job.model)
    shapes = {name: tuple(one.shape) for name, one in anatomy.model.state_dict().items()}
    assert CAUSAL.stored_names(anatomy.model, shapes | {"lm_head.weight": (300, 8)}).unused == {"lm_head.weight"}
    with pytest.raises(
        ModelError, match=re.escape("score.weight has 3 labels, and model.head has 4; choose a head of 3 labels")
    ):
        CAUSAL.stored_names(CAUSAL.build(other.model).model, shapes)
