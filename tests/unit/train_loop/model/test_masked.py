"""Masked language models: the settings and rows that go with them, and the models that have them."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from tests.support.builders.specs import may_read, raw_spec, spec
from train_loop.data.dataset import IGNORE
from train_loop.data.masking import masking_of
from train_loop.data.prepare.encode import BadRow, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.rows import Row
from train_loop.data.text.tokenizer import load_tokenizer, train_tokenizer
from train_loop.errors import DataError, ModelError
from train_loop.loop.objectives.token_cross_entropy import MaskedLoss
from train_loop.model.families.masked import MASKED
from train_loop.model.folder import model_shape
from train_loop.model.load import match_folder
from train_loop.plan import plan_job
from train_loop.preflight.checks import answer
from train_loop.spec import JobSpec, SpecError

BERT: dict[str, Any] = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
TOKENS = {"mask_token": 4, "special_tokens": [0, 2, 3]}
ROWS = {"columns": {"input_ids": "ids"}, "packing": False}
TEXT = {"packing": False}


def job_of(head: Any = "masked_lm", data: dict[str, Any] | None = None, **parts: Any) -> JobSpec:
    model = {"config": BERT, "head": head} | parts.pop("model", {})
    length = {} if data and "sequence_length" in data else {"sequence_length": 32}
    return spec(model=model, data=(TEXT if data is None else data) | length, **parts)


def write_tokenizer(folder: Path, **special: str) -> Path:
    """Write a tokenizer of single bytes that writes CLS and SEP around text, as BERT's does, and has no EOS."""
    names = ["<pad>", "<unk>", "<cls>", "<sep>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing("<cls> $A <sep>", None, [("<cls>", 2), ("<sep>", 3)])
    named = {"pad_token": "<pad>", "cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"} | special
    known = {name: token for name, token in named.items() if token}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("head", "data", "parts", "message"),
    [
        ("masked_lm", {}, {}, "set data.packing: false"),
        ("masked_lm", ROWS, {}, "needs the mask token and the tokens that are never masked"),
        ({"masked_lm": {"mask_token": 4}}, ROWS, {}, "mask_token and special_tokens"),
        ({"masked_lm": {"probability": 0}}, TEXT, {}, "/model/head/masked_lm/probability: input should be greater"),
        ({"masked_lm": {"mask_replace_prob": 0.95}}, TEXT, {}, "together more than 1; lower one of them"),
        ({"masked_lm": {"mlm_probability": 0.2}}, TEXT, {}, "use model.head.masked_lm.probability"),
        ({"masked_lm": {"whole_word_mask": True}}, TEXT, {}, "/model/head/masked_lm/whole_word_mask: no such field"),
        ("masked_lm", TEXT | {"columns": {"messages": "m"}}, {}, "needs columns.text or columns.input_ids"),
        ("masked_lm", TEXT | {"columns": {"text": "t", "weight": "w"}}, {}, "remove columns.weight"),
        ("masked_lm", ROWS | {"columns": {"input_ids": "i", "labels": "l"}}, {}, "remove columns.labels"),
        ("masked_lm", TEXT, {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}, "set ulysses_size: 1"),
        ("masked_lm", TEXT, {"training": {"reproducible": "any_size", "global_batch_size": 8}}, "same bits"),
        (
            "masked_lm",
            TEXT | {"eval": {"path": "stdlib://*.py"}},
            {
                "checkpoint": {"keep_best": {"metric": "eval_f1", "mode": "max"}, "every_steps": 2},
                "training": {"eval_steps": 2},
            },
            "model.head=masked_lm has no eval_f1 for keep_best.metric; choose eval_loss or eval_perplexity or "
            "eval_accuracy",
        ),
    ],
)
def test_setting_that_masked_models_do_not_have_is_refused(head: Any, data: Any, parts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        job_of(head, data, **parts)


def test_text_gets_the_special_tokens_of_its_tokenizer_and_no_eos(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    with pytest.raises(DataError, match="has no eos_token"):
        load_tokenizer(str(folder))
    job, rules = job_of(), TextRules(str(folder), plain=True)
    good, empty = encode_rows([Row(0, {"text": "ab"}), Row(1, {"text": ""})], job.data.columns, vocab=300, rules=rules)
    assert not isinstance(good, BadRow)
    assert good.input_ids.tolist() == PreTrainedTokenizerFast.from_pretrained(folder)("ab")["input_ids"]
    assert not isinstance(empty, BadRow)
    assert empty.input_ids.tolist() == [2, 3]


@pytest.mark.parametrize("rule", ["truncate", "truncate_left"])
def test_truncated_text_keeps_its_special_tokens_as_in_transformers(tmp_path: Path, rule: Any) -> None:
    folder, data = write_tokenizer(tmp_path), TEXT | {"sequence_length": 6, "on_long_rows": rule}
    job, rules = job_of(data=data), TextRules(str(folder), plain=True)
    (whole,) = encode_rows([Row(0, {"text": "abcdefgh"})], job.data.columns, vocab=300, rules=rules)
    assert not isinstance(whole, BadRow)
    found, fate = Fit.of(job, job.data.columns, rules)(whole)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder, truncation_side="left" if "left" in rule else "right")
    assert found.input_ids.tolist() == theirs("abcdefgh", truncation=True, max_length=6)["input_ids"]
    assert fate == "long"


def test_mask_takes_its_tokens_from_tokenizer_and_spec(tmp_path: Path) -> None:
    named, other = write_tokenizer(tmp_path / "a"), write_tokenizer(tmp_path / "b", mask_token="")
    found = masking_of(job_of({"masked_lm": {"probability": 0.3, "special_tokens": [7]}}), named)
    assert found is not None
    assert (found.token, found.never, found.vocabulary, found.probability) == (4, (0, 2, 3, 4, 7), 261, 0.3)
    with pytest.raises(
        DataError, match=r"the tokenizer in .*b has no mask_token; name it in the tokenizer's files, or"
    ):
        masking_of(job_of(), other)
    by_spec = masking_of(job_of({"masked_lm": {"mask_token": 9}}), other)
    assert by_spec is not None
    assert (by_spec.token, by_spec.never) == (9, (0, 2, 3, 9))
    with pytest.raises(DataError, match=r"token 300 of model\.head=masked_lm is not in the model's vocabulary of 300"):
        masking_of(job_of({"masked_lm": {"mask_token": 300}}), other)
    alone = masking_of(job_of({"masked_lm": TOKENS}, ROWS), None)
    assert alone is not None
    assert (alone.token, alone.never, alone.vocabulary) == (4, (0, 2, 3, 4), 300)
    of_rows = masking_of(job_of("masked_lm", ROWS, model={"tokenizer": str(named)}), None)
    assert of_rows is not None
    assert of_rows.token == 4
    assert masking_of(job_of("causal_lm", {}), named) is None


def test_trained_tokenizer_has_a_mask_token(tmp_path: Path) -> None:
    train_tokenizer(iter(["some text"] * 9), vocab_size=300, folder=tmp_path, masks=True)
    found = masking_of(job_of(), tmp_path)
    assert found is not None
    assert found.never == (0, 1)
    assert found.token == 1


def problems(tmp_path: Path, model: dict[str, Any], data: dict[str, Any] | None = None) -> dict[str, str]:
    """Return the problems that a submission would name, by pointer."""
    pq.write_table(pa.table({"text": ["some text"] * 4, "ids": [[2, 9, 3]] * 4}), tmp_path / "d.parquet")
    raw = raw_spec(
        model={"config": BERT, "head": "masked_lm"} | model,
        data={"train": {"path": str(tmp_path / "d.parquet")}, "sequence_length": 32} | (data or TEXT),
    )
    found = answer({"spec": raw, "read_policy": may_read(str(tmp_path)).model_dump(), "parent": None})
    assert found["problems"] or found["shape"]
    return {one["pointer"]: one["message"] for one in found["problems"]}


def test_preflight_accepts_masked_models_and_names_what_they_lack(tmp_path: Path) -> None:
    named, other = write_tokenizer(tmp_path / "a"), write_tokenizer(tmp_path / "b", mask_token="")
    assert not problems(tmp_path, {"tokenizer": str(named)}, ROWS)
    assert "has no mask_token" in problems(tmp_path, {"tokenizer": str(other)})["/model/head"]
    roberta = {"config": BERT | {"model_type": "roberta"}}
    found = problems(tmp_path, roberta, TEXT | {"sequence_length": 63})
    assert "pad_token_id=1 of RobertaForMaskedLM is a token of text" in found["/model/config"]
    assert "sequence_length=63 is more than the 62 positions" in found["/data/sequence_length"]
    found = problems(tmp_path, {"config": BERT | {"pad_token_id": 4}, "tokenizer": str(named)})
    assert "token 4 is both the mask token and pad_token_id" in found["/model/head"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen3"}, "needs an encoder of text alone, and model_type=qwen3 is none"),
        ({"model_type": "bart", "d_model": 16}, "needs an encoder of text alone, and model_type=bart is none"),
        (BERT | {"is_decoder": True}, "a masked language model also sees later tokens; set it to false"),
        (BERT | {"add_cross_attention": True}, "add_cross_attention: true is not supported for bert"),
        ({"model_type": "fnet", "vocab_size": 300}, "no num_attention_heads; choose an encoder with attention heads"),
        (BERT | {"model_type": "big_bird"}, 'attention_type: "block_sparse" is not supported for big_bird'),
        (BERT | {"model_type": "convbert"}, "its logits of a row depend on the padding behind it"),
        (BERT | {"model_type": "squeezebert", "embedding_size": 16}, "calls the forward functions of its layers"),
        (BERT | {"model_type": "mra"}, "needs kernels that are downloaded during the run"),
    ],
)
def test_model_that_is_no_masked_model_in_this_loop_is_refused(config: dict[str, Any], message: str) -> None:
    job = job_of(model={"config": config})
    with pytest.raises(ModelError, match=re.escape(message)):
        MASKED.examine(MASKED.build(job.model), job)


def test_positions_of_roberta_begin_behind_the_padding_token() -> None:
    config = BERT | {"model_type": "roberta"}
    for length, fits in ((62, True), (63, False)):
        job = job_of(data=TEXT | {"sequence_length": length}, model={"config": config})
        found = MASKED.examine(MASKED.build(job.model), job)
        (check,) = [one.check for one in found.settings if one.pointer == "/data/sequence_length"]
        if fits:
            check()
        else:
            with pytest.raises(ModelError, match="more than the 62 positions of RobertaForMaskedLM"):
                check()


def test_folder_gives_the_encoder_and_its_head_if_it_has_one(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**BERT)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "masked")
    AutoModel.from_config(config).save_pretrained(tmp_path / "encoder")
    stored = load_file(tmp_path / "masked" / "model.safetensors")
    # As the folders of BERT's pretraining, which have the head of a second task.
    save_file(stored | {"cls.seq_relationship.weight": torch.zeros(2, 16)}, tmp_path / "masked" / "model.safetensors")
    anatomy = MASKED.build(job_of().model)
    head = [name for name, _ in anatomy.model.named_parameters() if not name.startswith("bert.")]
    found = match_folder(anatomy, tmp_path / "masked")
    assert all(found.homes.values())
    assert found.unused == ["cls.seq_relationship.weight"]
    found = match_folder(anatomy, tmp_path / "encoder")
    assert [name for name, stored in found.homes.items() if not stored] == head
    save_file(
        {name: one for name, one in stored.items() if "transform.dense" not in name},
        tmp_path / "masked" / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"missing: cls\.predictions\.transform\.dense"):
        match_folder(anatomy, tmp_path / "masked")


def test_row_of_padding_alone_has_numbers() -> None:
    anatomy = MASKED.build(job_of(model={"config": BERT | {"model_type": "roberta"}}).model)
    model = type(anatomy.model)(anatomy.model.config).eval()
    columns = {"input_ids": torch.zeros(2, 5, dtype=torch.int64), "length": torch.tensor([3, 0])}
    with torch.no_grad():
        assert MASKED.call(model, columns, MASKED.arguments(model, columns)).isfinite().all()


@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_evaluation_counts_hits_in_chunks_as_in_whole_logits(chunk_rows: int | None) -> None:
    torch.manual_seed(0)
    anatomy = MASKED.anatomy(type(MASKED.build(job_of().model).model)(AutoConfig.for_model(**BERT)).eval())
    loss = MaskedLoss(anatomy, chunk_rows=chunk_rows)
    ids = torch.randint(5, 300, (2, 7))
    labels = torch.where(torch.rand(2, 7) < 0.5, ids, IGNORE)
    batch: Any = type("Batch", (), {"labels": labels, "weights": None})()
    batch.values = {"input_ids": ids, "length": torch.tensor([7, 7])}
    batch.attention = anatomy.family.arguments(anatomy.model, batch.values)
    with torch.no_grad():
        found = loss.metrics(
            dict(zip(loss.evaluation_sums, map(torch.Tensor.double, loss.evaluate(batch)), strict=True))
        )
        fresh: Any = type(anatomy.model)(AutoConfig.for_model(**BERT)).eval()
        fresh.load_state_dict(anatomy.model.state_dict())
        out = fresh(input_ids=ids, labels=labels)
    right = (out.logits.argmax(-1) == labels)[labels != IGNORE].double().mean().item()
    expected = {"loss": out.loss.item(), "perplexity": out.loss.exp().item(), "accuracy": right}
    assert found == pytest.approx(expected | {"tokens": int((labels != IGNORE).sum())}, rel=1e-5)


def test_plan_counts_the_padding_mask_and_whole_logits() -> None:
    job = job_of(training={"per_device_train_batch_size": 4})
    terms = {term.name: term.bytes for term in plan_job(job, model_shape(job.model)).memory}
    # A mask, and its copy in fp32 in the layer that computes.
    assert terms["attention_mask"] == 4 * (1 + 4) * 32**2
    assert terms["logits"] > 0
    assert model_shape(job.model).tied
