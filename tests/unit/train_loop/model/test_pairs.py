"""Rows of several sequences that stay together: the tokens of pairs, their samples, and their settings."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModel, AutoTokenizer

from tests.support.builders.folders import write_model
from tests.support.builders.specs import TINY, may_read, raw_spec, spec
from tests.support.families.families import small
from tests.support.tokenizers import chats
from train_loop.data.dataset import Dataset
from train_loop.data.order import PADDING
from train_loop.data.prepare.cache import list_sources
from train_loop.data.prepare.encode import BadRow, TextRules, encode_rows
from train_loop.data.prepare.fit import Fit
from train_loop.data.prepare.packing import Document, one_per_sample
from train_loop.data.prepare.pipeline import _encode_task, _from_table
from train_loop.data.prepare.progress import Progress
from train_loop.data.prepare.rows import Row, cut
from train_loop.data.shards import write_part
from train_loop.data.stream.local import read_rows
from train_loop.errors import ModelError
from train_loop.loop.batch import StepBatch
from train_loop.model.build import materialise
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.families.choose import family_of
from train_loop.model.folder import model_shape
from train_loop.model.load import give_weights
from train_loop.plan import SampleCount, plan_job
from train_loop.preflight.checks import answer
from train_loop.preflight.sample_count import count_samples
from train_loop.spec import ColumnsSpec, JobSpec, SpecError

PAIR = {"chosen": "c", "rejected": "r"}
IDS = PAIR | {"token_ids": True}
ANCHOR = {"anchor": "a", "positive": "p"}
NEGATIVE = {"path": "/x", "columns": ANCHOR | {"negatives": ["n"]}}
EMBEDDING = {"embedding": {"group": 1}}
ASK = [chats.user("Hi?")]
TALK, OTHER = [*ASK, chats.assistant("Yes.")], [*ASK, chats.assistant("No, never.")]


def job_of(columns: dict[str, Any], *, head: Any = "reward", **parts: Any) -> JobSpec:
    data = {"columns": columns, "packing": False} | parts.pop("data", {})
    return spec(model={"head": head} | parts.pop("model", {}), data=data, **parts)


def encode(folder: str | None, columns: dict[str, Any], **cells: Any) -> Any:
    rules = None if folder is None else TextRules(folder)
    read = ColumnsSpec.model_validate_json(json.dumps(columns))
    (found,) = encode_rows([Row(0, cells)], read, vocab=384, rules=rules)
    return found


@pytest.mark.parametrize(
    ("columns", "parts", "message"),
    [
        ({"chosen": "c"}, {}, "columns.chosen and columns.rejected go together"),
        ({"positive": "c", "text": "t"}, {}, "columns.anchor and columns.positive go together"),
        ({"text": "t", "negatives": ["n"]}, {}, "columns.negatives go with columns.anchor"),
        ({"text": "t", "token_ids": True}, {}, "columns.token_ids is for pairs"),
        (PAIR | ANCHOR, {}, "exactly one of text, input_ids"),
        (ANCHOR, {}, "model.head=reward needs columns.chosen and columns.rejected"),
        ({"text": "t"}, {"head": "embedding"}, "model.head=embedding needs columns.anchor and columns.positive"),
        (ANCHOR, {"head": "embedding"}, "group=8 does not divide per_device_train_batch_size=1, and a group lies in"),
        (ANCHOR, {"head": EMBEDDING, "data": {"eval": NEGATIVE}, "training": {"eval_steps": 1}}, "as many columns.neg"),
        (ANCHOR, {"head": EMBEDDING, "data": {"packing": True}}, "set data.packing: false"),
        (
            ANCHOR,
            {"head": EMBEDDING, "training": {"label_smoothing_factor": 0.1}},
            "no meaning for model.head=embe",
        ),
        (ANCHOR, {"head": {"embedding": {"temperature": 0}}}, "temperature"),
        ({"text": "t", "margin": "m"}, {}, "columns.margin goes with columns.chosen"),
        (PAIR | {"text": "t"}, {}, "exactly one of text, input_ids"),
        (PAIR | {"weight": "w"}, {}, "which pairs do not have"),
        (PAIR | {"response": "x"}, {}, "columns.prompt and columns.response go together"),
        (PAIR, {"data": {"packing": True}}, "set data.packing: false"),
        (PAIR, {"data": {"on_long_rows": "split"}}, "cannot be split"),
        (PAIR, {"head": "causal_lm"}, "go with model.head: reward"),
        ({"text": "t"}, {}, "needs columns.chosen and columns.rejected"),
        (PAIR, {"strategy": {"ulysses_size": 2}, "scaling": {"num_workers": 2}}, "set ulysses_size: 1"),
        (PAIR, {"training": {"label_smoothing_factor": 0.1}}, "has no meaning for model.head=reward"),
        (IDS, {"data": {"system_prompt": "x"}}, "system_prompt goes with columns.messages"),
    ],
)
def test_setting_that_does_not_fit_pairs_is_refused(columns: Any, parts: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        job_of(columns, **parts)


@pytest.mark.parametrize("pad", ["<pad>", "<|im_end|>", None])
def test_pairs_of_text_and_conversations_have_the_tokens_of_trl(tmp_path: Path, pad: str | None) -> None:
    folder = chats.write_tokenizer(tmp_path / "t", template=chats.CHATML, eos="<|im_end|>")
    peer: Any = AutoTokenizer.from_pretrained(folder)
    if pad is not None:
        peer.add_special_tokens({"pad_token": pad})
        peer.save_pretrained(folder)
    padding = peer.convert_tokens_to_ids(pad or "<|im_end|>")

    def as_in_trl(text: str) -> list[int]:
        """Return the tokens up to the one from which transformers reads the reward."""
        ids: list[int] = peer(text)["input_ids"]
        return ids[: max(n for n, token in enumerate(ids, start=1) if token != padding)]

    ended = "No.<|im_end|>"
    found = encode(folder, PAIR | {"prompt": "p"}, p="Hi? ", c="Yes.", r=ended)
    expected = [as_in_trl("Hi? Yes.<|im_end|>"), as_in_trl("Hi? No.<|im_end|>")]
    assert [one.input_ids.tolist() for one in found.sequences] == expected
    for cells in ({"c": TALK, "r": OTHER}, {"p": ASK, "c": TALK[1:], "r": OTHER[1:]}):
        found = encode(folder, PAIR | ({"prompt": "p"} if "p" in cells else {}), **cells)
        texts = [peer.apply_chat_template(talk, tokenize=False) for talk in (TALK, OTHER)]
        assert [one.input_ids.tolist() for one in found.sequences] == [as_in_trl(text) for text in texts]


def test_texts_to_embed_have_the_tokens_of_the_tokenizer_also_if_they_are_long(tmp_path: Path) -> None:
    folder = chats.write_tokenizer(tmp_path / "t", template=chats.CHATML, eos="<|im_end|>")
    ended(folder, "<|im_end|>")
    peer: Any = AutoTokenizer.from_pretrained(folder)
    columns = ANCHOR | {"negatives": ["n"]}
    texts = ["Hi?", "Hello, how are you?", "<|im_end|>"]
    job = job_of(columns, head=EMBEDDING, data={"sequence_length": 6})
    rules = TextRules(folder, plain=not job.model.ends_text)
    found = encode(folder, columns, **dict(zip("apn", texts, strict=True)))
    assert [one.input_ids.tolist() for one in found.sequences] == peer(texts)["input_ids"]
    fitted, fate = Fit.of(job, job.data.columns, rules)(found)
    assert fate == "long"
    expected = peer(texts, truncation=True, max_length=6)["input_ids"]
    assert [one.input_ids.tolist() for one in fitted.sequences] == expected
    assert expected[1][-1] == peer.eos_token_id


def ended(folder: str, eos: str) -> None:
    """Make a tokenizer end each text with a token, as those of embedding models do."""
    backend = Tokenizer.from_file(f"{folder}/tokenizer.json")
    token = (eos, backend.token_to_id(eos))
    backend.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[token])
    backend.save(f"{folder}/tokenizer.json")


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        *(("qwen3", "last_token"), ("qwen3", "mean"), ("gpt2", "mean"), ("mamba", "last_token")),
        *(("bert", "mean"), ("modernbert", "cls"), ("roberta", "last_token")),
    ],
)
def test_embeddings_are_those_of_transformers_for_each_family(family: str, pooling: str) -> None:
    head = {"embedding": {"group": 1, "pooling": pooling}}
    job = job_of(ANCHOR, head=head, model={"config": TINY if family == "qwen3" else small(family)})
    models = family_of(job)
    anatomy, model = models.build(job.model), models.build(job.model).model
    for check in models.examine(models.anatomy(model), job).settings:
        check.check()
    materialise(model, anatomy, seed=0, device=torch.device("cpu"))
    ids, lengths = torch.randint(8, 60, (3, 9), generator=torch.Generator().manual_seed(0)), torch.tensor([9, 2, 5])
    columns = {"input_ids": ids, "position_ids": torch.arange(9).expand(3, 9), "length": lengths}
    its: Any = model
    peer = AutoModel.from_config(AutoConfig.for_model(**its.config.to_dict())).eval()
    # BERT's pooler is for another task.
    absent = peer.load_state_dict(model.state_dict(), strict=False)
    assert all(name.startswith("pooler.") for name in absent.missing_keys)
    with torch.no_grad():
        found = models.call(model.eval(), columns, models.arguments(model, columns))
        states = [peer(input_ids=ids[n : n + 1, :size]).last_hidden_state[0] for n, size in enumerate(lengths.tolist())]
    pooled = torch.stack([{"last_token": one[-1], "mean": one.mean(0), "cls": one[0]}[pooling] for one in states])
    torch.testing.assert_close(found, torch.nn.functional.normalize(pooled, dim=-1), rtol=1e-4, atol=1e-6)
    shape = model_shape(job.model)
    assert family != "qwen3" or shape.parameters == sum(one.numel() for one in model.parameters())
    assert {term.name: term.bytes for term in plan_job(job, shape).memory}["logits"] == 0


@pytest.mark.parametrize(
    ("config", "pooling", "message"),
    [(TINY, "cls", "sees no other one in a decoder"), (small("bart"), "mean", "model_type=bart")],
)
def test_model_that_cannot_embed_is_refused(config: Any, pooling: str, message: str) -> None:
    head = {"embedding": {"group": 1, "pooling": pooling}}
    with pytest.raises(ModelError, match=message):
        CAUSAL.build(job_of(ANCHOR, head=head, model={"config": config}).model)


@pytest.mark.parametrize(
    ("columns", "cells", "reason"),
    [
        (PAIR, {"c": "a", "r": None}, "column 'r' holds null where text is needed"),
        (PAIR, {"c": None, "r": "a"}, "column 'c' holds null where text is needed"),
        (PAIR, {"c": TALK, "r": "a"}, "column 'r' holds text where a list of messages as in column 'c' is needed"),
        (PAIR, {"c": "a", "r": TALK}, "column 'r' holds a list where text is needed"),
        (PAIR, {"c": TALK, "r": []}, "column 'r' holds an empty list"),
        (PAIR, {"c": TALK, "r": [{"role": "user"}]}, "column 'r': messages[0] "),
        (PAIR, {"c": "a", "r": ""}, "column 'r': it has no tokens but padding"),
        (PAIR | {"margin": "m"}, {"c": "a", "r": "b", "m": None}, "column 'm' holds null where a finite number"),
        (PAIR | {"margin": "m"}, {"c": "a", "r": "b", "m": float("inf")}, "a finite number is needed"),
        (IDS, {"c": [1], "r": [384]}, "column 'r' holds 384 at position 0, which is not in the model's vocabulary"),
        (IDS, {"c": [], "r": [1]}, "column 'c' holds an empty list"),
        (IDS, {"c": "a", "r": [1]}, "column 'c' holds text where a list of whole numbers is needed"),
        (ANCHOR, {"a": "x", "p": TALK}, "column 'p' holds a list where text is needed"),
        (ANCHOR, {"a": "x", "p": ""}, "column 'p': it has no tokens"),
    ],
)
def test_pair_that_cannot_be_trained_is_a_bad_row(tmp_path: Path, columns: Any, cells: Any, reason: str) -> None:
    folder = chats.write_tokenizer(tmp_path / "t", template=chats.CHATML, eos="<|im_end|>")
    found = encode(None if columns is IDS else folder, columns, **cells)
    assert isinstance(found, BadRow)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("rule", "kept"), [("drop", []), ("truncate", [[1, 2], [5, 6]]), ("truncate_left", [[1, 2], [6, 7]])]
)
def test_rule_for_long_rows_holds_for_each_sequence(rule: Any, kept: list[list[int]]) -> None:
    fit = Fit(2, rule, drops_untrained=False)
    fitted, _ = fit(Document(np.array([1, 2, 5, 6, 7], np.int32), sizes=(2, 3)))
    assert [one.input_ids.tolist() for one in fitted.sequences if len(one.input_ids)] == kept
    assert fit.refuses(fitted) is False


def test_pair_stays_one_sample_from_the_file_to_the_model(tmp_path: Path) -> None:
    table = {"c": [[1, 2, 3], [9]], "r": [[4], [5, 6]], "p": [[7], [8]], "m": [0.5, -1.0]}
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    job = job_of(IDS | {"prompt": "p", "margin": "m"}, data={"train": {"path": str(tmp_path / "d.parquet")}})
    assert count_samples(job) == SampleCount(2, exact=True)
    (source,) = list_sources(job)
    tasks, progress = [cut(source.files, 2**20)], Progress(lambda *_, **__: None, [1])
    encoded = partial(encode_rows, columns=source.columns, vocab=384)
    fit = Fit.of(job, source.columns, None)
    tables = list(_encode_task({"id": np.array([0])}, tasks, source.columns, encoded, False, fit))
    documents = [one for found in tables for one in _from_table(found, tasks, progress)]
    part = write_part(one_per_sample(documents, 4), tmp_path)
    dataset = Dataset(fingerprint="x", parts=(part,), sequence_length=4, sequences=2)
    rows = read_rows(dataset, np.array([1, PADDING, 0]))
    assert rows.input_ids.tolist() == [[[8, 9, 0, 0], [8, 5, 6, 0]], [[0] * 4] * 2, [[7, 1, 2, 3], [7, 4, 0, 0]]]
    assert rows.lengths.tolist() == [[2, 3], [0, 0], [4, 2]]
    assert rows.targets.tolist() == [-1.0, 0.0, 0.5]
    assert type(rows).from_arrow(rows.to_arrow()).input_ids.tolist() == rows.input_ids.tolist()
    assert dataset.utilisation == 11 / 16
    assert StepBatch(rows.values, dataset.columns).tokens == 11


def test_plan_counts_both_sequences_of_a_pair() -> None:
    single = job_of({"text": "t", "label": "l"}, head={"regression": {}})
    pair = job_of(PAIR)
    one, two = (plan_job(job, model_shape(job.model)) for job in (single, pair))
    of_one, of_two = ({term.name: term.bytes for term in plan.memory} for plan in (one, two))
    assert of_two["activations"] == 2 * of_one["activations"]
    assert of_two["logits"] == 2 * of_one["logits"]
    assert one.batch == two.batch


@pytest.mark.parametrize(
    ("columns", "table", "message"),
    [
        (PAIR, {"c": ["a"]}, "has no column 'r'"),
        (PAIR, {"c": [[1]], "r": [[2]]}, "for lists of token ids set columns.token_ids: true"),
        (IDS, {"c": ["a"], "r": ["b"]}, "column 'c' has type string; expected lists of integers"),
        (PAIR | {"margin": "m"}, {"c": ["a"], "r": ["b"], "m": ["x"]}, "column 'm' has type string; expected a number"),
        (PAIR, {"c": [TALK], "r": [OTHER]}, "name a tokenizer in model.tokenizer"),
        (PAIR, {"c": ["a"], "r": [None]}, "row 0: column 'r' holds null where text is needed"),
    ],
)
def test_preflight_refuses_columns_by_name(tmp_path: Path, columns: Any, table: Any, message: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    data = {"train": {"path": str(tmp_path / "d.parquet")}, "columns": columns, "packing": False}
    raw = raw_spec(model={"head": "reward"}, data=data)
    found = answer({"spec": raw, "read_policy": may_read(str(tmp_path)).model_dump(), "parent": None})["problems"]
    assert message in found[0]["message"]


def test_folder_of_a_language_model_gives_all_weights_but_its_head(tmp_path: Path) -> None:
    write_model(tmp_path)
    source = {"path": str(tmp_path), "config": None}
    for head, columns in (("reward", PAIR), (EMBEDDING, ANCHOR)):
        job = job_of(columns, head=head, model=source)
        model = CAUSAL.build(job.model).model
        given = give_weights(model, CAUSAL.build(job.model), job.model, seed=0, device=torch.device("cpu"))
        assert given == ["lm_head.weight"]
        found = model.state_dict()
        prefix = "model." if head == "reward" else ""
        for name, value in AutoModel.from_pretrained(tmp_path).state_dict().items():
            assert torch.equal(found[prefix + name], value), name
