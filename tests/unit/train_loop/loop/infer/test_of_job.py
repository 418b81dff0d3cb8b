"""Ends of rows that the model of a job generates: those of the job's export."""

from pathlib import Path

from transformers import AutoTokenizer

from tests.support.builders.checkpoints import manifest
from tests.support.builders.specs import TINY, spec
from tests.support.tokenizers.chats import TEMPLATES, write_tokenizer
from train_loop.data.dataset import Dataset
from train_loop.loop.infer.of_job import stop_tokens_of_job
from train_loop.run_dir import Parent, RunDir


def test_answers_of_a_job_that_trained_conversations_also_end_as_its_template_ends_turns(tmp_path: Path) -> None:
    template, bos, eos = TEMPLATES["gemma"]
    write_tokenizer(tmp_path / "tokenizer", template=template, bos=bos, eos=eos)
    tokenizer, run_dir = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), RunDir(tmp_path / "run")
    job = spec(
        model={"tokenizer": str(tmp_path / "tokenizer"), "config": TINY | {"vocab_size": len(tokenizer)}},
        data={"train": {"path": "/chats.jsonl"}, "columns": {"messages": "chat"}},
    )
    run_dir.write_spec(job)
    dataset = Dataset(fingerprint="d", parts=(), sequence_length=32, tokenizer=str(tmp_path / "tokenizer"))
    run_dir.data.parent.mkdir()
    run_dir.data.write_text(dataset.model_dump_json())
    parent = Parent(
        job="job-1", run_dir=str(run_dir.root), manifest=manifest(3), same_order=False, same_optimizer=False
    )
    assert stop_tokens_of_job(parent) == tuple(tokenizer.convert_tokens_to_ids([eos, "<end_of_turn>"]))
