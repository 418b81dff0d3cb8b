"""Results of an inference job in its run directory."""

from pathlib import Path

from train_loop.run_dir import RunDir


def test_complete_shards_end_at_the_first_gap(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert (run_dir.results.complete, run_dir.committed()) == (0, None)
    for number in (0, 1, 3):
        run_dir.results.commit(number, b"rows")
    (tmp_path / "results" / ".part-000002.parquet.1-2").write_bytes(b"half")
    assert run_dir.results.shards() == [0, 1, 3]
    assert (run_dir.results.complete, run_dir.committed()) == (2, 2)


def test_repeated_commit_keeps_one_shard(tmp_path: Path) -> None:
    results = RunDir(tmp_path).results
    for content in (b"rows", b"rows"):
        results.commit(0, content)
    assert [path.name for path in results.root.iterdir()] == ["part-000000.parquet"]
