"""Generation: greedy tokens are those of transformers, and the tokens of a row depend on no other row and no rank."""

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from tests.support.builders.searches import drawn
from tests.support.builders.specs import TINY, infer_spec
from tests.support.ranks.infer_runs import infer_rows, save_model
from tests.support.ranks.ranks import ranks_of_any_number
from tests.support.ranks.torchrun import write_tokens
from train_loop.errors import ModelError
from train_loop.loop.infer.calls import SplitCalls
from train_loop.model.families.choose import family_of
from train_loop.model.folder import model_shape
from train_loop.parallel.build import build_sharded
from train_loop.parallel.mesh import build_mesh
from train_loop.plan import plan_job
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import parse_any

LENGTH, ROWS, NEW = 20, 11, 12
SIZES = {"vocab_size": TINY["vocab_size"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 48, "num_key_value_heads": 2},
    "qwen3": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {},
    "gemma2": {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    "mpt": {"attn_config": {}},
    "bloom": {},
    "gpt_neox_japanese": {},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call_ranks() -> Iterator[Call]:
    with ranks_of_any_number(4) as call:
        yield call


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with rows of uneven lengths, and models."""
    folder = tmp_path_factory.mktemp("generate")
    write_tokens(folder / "d.parquet", rows=ROWS, length=(1, LENGTH), vocab=SIZES["vocab_size"])
    for kind, more in FAMILIES.items():
        save_model(folder / kind, {"model_type": kind} | SIZES | more)
    save_model(folder / "qwen3_moe", {"model_type": "qwen3_moe"} | SIZES | FAMILIES["qwen3"] | EXPERTS)
    return folder


def job(
    data: Path, kind: str = "qwen3", *, batch: int = 3, strategy: dict[str, Any] | None = None, **generation: Any
) -> dict[str, Any]:
    """Return the spec of a job that generates after the rows."""
    return {
        "model": {"path": str(data / kind), "dtype": "fp32"},
        "data": {
            "train": {"path": str(data / "d.parquet")},
            "columns": {"input_ids": "ids"},
            "sequence_length": LENGTH,
        },
        "infer": {
            "output": "generate",
            "batch_size": batch,
            "rows_per_shard": 4,
            "generation": {"max_new_tokens": NEW} | generation,
        },
        "strategy": strategy or {},
    }


def tokens_of(found: list[dict[str, Any]]) -> list[list[int]]:
    assert [row["row"] for row in found] == list(range(ROWS))
    return [row["generated_tokens"] for row in found]


@functools.cache
def plain_tokens(data: Path, kind: str, **more: Any) -> list[list[int]]:
    """Return the tokens that transformers generates after each row alone."""
    model = AutoModelForCausalLM.from_pretrained(data / kind, dtype=torch.float32).eval()
    found = []
    for ids in pq.read_table(data / "d.parquet")["ids"].to_pylist():
        out = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)
        found.append(out[0, len(ids) :].tolist())
    return found


@pytest.mark.parametrize("kind", drawn(list(FAMILIES), 4))
def test_greedy_tokens_equal_those_of_transformers(data: Path, tmp_path: Path, call_ranks: Call, kind: str) -> None:
    _, found = call_ranks(1, infer_rows, job(data, kind), tmp_path)
    assert tokens_of(found) == plain_tokens(data, kind)


def test_tokens_do_not_depend_on_ranks_and_batches(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "logprobs": True}
    _, one = call_ranks(1, infer_rows, job(data, **sampled), tmp_path / "sampled-1")
    greedy = plain_tokens(data, "qwen3")
    assert tokens_of(one) != greedy
    outcome, found = call_ranks(4, infer_rows, job(data, batch=2, strategy={"fsdp_size": 2}), tmp_path / "greedy")
    assert (outcome.result, outcome.step) == ("succeeded", ROWS)
    assert tokens_of(found) == greedy
    sizes: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (2, 1, {"sharding_strategy": "NO_SHARD"}),
        (2, 2, {"ulysses_size": 2}),
        (4, 5, {"fsdp_size": 2, "ulysses_size": 2}),
    )
    for world, batch, strategy in sizes:
        name = f"{world}-{batch}"
        raw = job(data, batch=batch, strategy=strategy, **sampled)
        _, found = call_ranks(world, infer_rows, raw, tmp_path / name)
        assert tokens_of(found) == tokens_of(one)
        assert_logprobs(found, one)


@pytest.mark.parametrize(
    ("kind", "world", "strategy"), [("llama", 4, {"tp_size": 2}), ("qwen3_moe", 2, {"ep_size": 2})]
)
def test_ranks_that_share_layers_or_experts_compute_as_one(
    data: Path, tmp_path: Path, call_ranks: Call, kind: str, world: int, strategy: dict[str, int]
) -> None:
    _, found = call_ranks(world, infer_rows, job(data, kind, strategy=strategy), tmp_path / "tokens")
    assert tokens_of(found) == plain_tokens(data, kind)
    scored = {"infer": {"output": "logprobs", "batch_size": 3}}
    _, one = call_ranks(1, infer_rows, job(data, kind) | scored, tmp_path / "one")
    _, found = call_ranks(world, infer_rows, job(data, kind, strategy=strategy) | scored, tmp_path / "several")
    of_rows = {"infer": {"output": "perplexity", "batch_size": 2}}
    _, rated = call_ranks(world, infer_rows, job(data, kind, strategy=strategy) | of_rows, tmp_path / "perplexity")
    for row, rate, other in zip(found, rated, one, strict=True):
        np.testing.assert_allclose(row["logprobs"], other["logprobs"], rtol=0, atol=1e-5)
        if other["logprobs"]:
            assert rate["perplexity"] == pytest.approx(np.exp(-np.mean(other["logprobs"])), rel=1e-5)
        else:
            assert rate["perplexity"] is None


SHARED: dict[str, tuple[str, int, dict[str, int]]] = {
    "fewer kv heads than ranks": ("qwen3", 4, {"ulysses_size": 4}),
    "windows and copies of the weights": ("gemma2", 4, {"ulysses_size": 2, "fsdp_size": 2}),
    "learned positions": ("gpt2", 2, {"ulysses_size": 2}),
    "shared layers": ("llama", 4, {"ulysses_size": 2, "tp_size": 2}),
    "experts": ("qwen3_moe", 2, {"ulysses_size": 2}),
    "attention of its own": ("gpt_neox_japanese", 2, {"ulysses_size": 2}),
    "biases by head": ("mpt", 2, {"ulysses_size": 2}),
    "no exact cache": ("bloom", 2, {"ulysses_size": 2}),
}


@pytest.mark.parametrize("case", drawn(list(SHARED), 3))
def test_ranks_that_share_sequences_write_the_tokens_of_one(
    data: Path, tmp_path: Path, call_ranks: Call, case: str
) -> None:
    kind, world, strategy = SHARED[case]
    _, found = call_ranks(world, infer_rows, job(data, kind, strategy=strategy), tmp_path)
    assert tokens_of(found) == plain_tokens(data, kind)
    warned = [one["event"] for one in read_lines(RunDir(tmp_path).attempt(1).events)].count("warning")
    assert warned == (case == "no exact cache"), "keys and values are cached unless a warning reports it"


def test_new_token_without_exchange_is_an_error(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    with pytest.raises(AssertionError, match=r"not active in all layers: 0 exchanges .*; expected 2, among them"):
        call_ranks(2, rows_without_exchange, job(data, strategy={"ulysses_size": 2}), tmp_path)


def rows_without_exchange(raw: dict[str, Any], folder: Path) -> None:
    add = SplitCalls.add

    def add_alone(calls: SplitCalls, tokens: torch.Tensor) -> torch.Tensor:
        with mock.patch("train_loop.parallel.ulysses.heads_to_seq", lambda x, *_, **__: x[:, :, :1].repeat(1, 2, 1, 1)):
            return add(calls, tokens)

    with mock.patch.object(SplitCalls, "add", add_alone):
        infer_rows(raw, folder)


def assert_logprobs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, other in zip(found, expected, strict=True):
        assert len(row["generated_logprobs"]) == len(row["generated_tokens"])
        np.testing.assert_allclose(row["generated_logprobs"], other["generated_logprobs"], rtol=0, atol=1e-5)


def test_logprobs_of_drawn_tokens_are_those_of_the_model(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    sampled: dict[str, Any] = {"temperature": 2.0, "top_k": 9, "seed": 5, "logprobs": True, "stop_tokens": []}
    _, found = call_ranks(1, infer_rows, job(data, **sampled), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(data / "qwen3", dtype=torch.float32).eval()
    for row in found:
        assert (len(row["generated_tokens"]), row["finish_reason"]) == (NEW, "length")
        ids = torch.tensor([row["ids"] + row["generated_tokens"]])
        with torch.no_grad():
            every = model(ids).logits[0, len(row["ids"]) - 1 : -1].log_softmax(-1)
        chosen = ids[0, len(row["ids"]) :, None]
        np.testing.assert_allclose(row["generated_logprobs"], every.gather(1, chosen)[:, 0], rtol=0, atol=1e-5)
        assert int((every > every.gather(1, chosen)).sum(1).max()) < 9, "only the 9 most probable tokens are drawn"


def test_row_ends_after_a_stop_token_while_others_go_on(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    whole = plain_tokens(data, "gpt2")
    stop = whole[4][3]
    _, found = call_ranks(2, infer_rows, job(data, "gpt2", stop_tokens=[stop]), tmp_path)
    for row, tokens in zip(found, whole, strict=True):
        size = tokens.index(stop) + 1 if stop in tokens else NEW
        assert row["generated_tokens"] == tokens[:size]
        assert row["finish_reason"] == ("stop" if stop in tokens else "length")
    assert {row["finish_reason"] for row in found} == {"stop", "length"}


def test_pause_between_tokens_drops_the_batch_alone(data: Path, tmp_path: Path, call_ranks: Call) -> None:
    # The third batch is paused after 8 of its 12 tokens: each batch asks before it, after 8 tokens, and at its end.
    raw = job(data, batch=2, stop_tokens=[])
    outcome, found = call_ranks(1, stopped_rows, raw, tmp_path, 7)
    assert (outcome.result, outcome.step, len(found)) == ("paused", 4, 4)
    outcome, found = call_ranks(2, infer_rows, raw, tmp_path)
    assert outcome.step == ROWS
    assert tokens_of(found) == plain_tokens(data, "qwen3", eos_token_id=None)


def stopped_rows(raw: dict[str, Any], folder: Path, looks: int) -> Any:
    return infer_rows(raw, folder, stop_after=looks)


def test_ranks_answer_after_they_have_left_their_group(tmp_path: Path, call_ranks: Call) -> None:
    call_ranks(2, leave_slowly, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


def leave_slowly(folder: Path) -> None:
    rank, leave = dist.get_rank(), dist.destroy_process_group

    def leave_and_report() -> None:
        replaced.stop()
        leave()
        time.sleep(0.3)
        (folder / str(rank)).touch()

    replaced = mock.patch.object(dist, "destroy_process_group", leave_and_report)
    replaced.start()


def test_model_that_each_rank_holds_has_no_units(data: Path, call_ranks: Call) -> None:
    counts = [
        call_ranks(2, count_units, job(data, strategy=strategy)) for strategy in ({"sharding_strategy": "NO_SHARD"}, {})
    ]
    assert counts == [0, 5]


def count_units(raw: dict[str, Any]) -> int:
    """Return the number of FSDP units: two layers, embeddings, head and root."""
    job = parse_any(infer_spec() | raw | {"scaling": {"num_workers": dist.get_world_size()}})
    mesh = build_mesh(plan_job(job, model_shape(job.model)).mesh, torch.device("cpu"))
    return sum(isinstance(module, FSDPModule) for module in build_sharded(job.run, mesh).model.modules())


def test_more_tokens_than_positions_are_refused(data: Path) -> None:
    config = {"model_type": "gpt2", "n_positions": 24, "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = {"config": config, "dtype": "fp32"}
    spec = parse_any(infer_spec() | job(data) | {"model": model}).run
    family = family_of(spec)
    anatomy = family.build(spec.model)
    faults = []
    for setting in family.examine(anatomy, spec).settings:
        try:
            setting.check()
        except ModelError as error:
            faults.append((setting.pointer, str(error)))
    assert faults == [
        (
            "/data/sequence_length",
            "sequence_length=20 and max_new_tokens=12 together are 32, which is more than the 24 positions of "
            "GPT2LMHeadModel; choose at most 24, or a model with more",
        )
    ]
