"""A step with tensor parallelism: Trainshed against transformers' own plans in the same ranks, and against FSDP2.

`python -m benchmarks.training.tensor [--ranks 2|4] [--rounds N] [--quick]`. All meshes train the same rows per step.
The table has the seconds of both, and the bytes that a rank moves.
"""

from collections.abc import Mapping

from benchmarks.training.meshes import Counts, compare_meshes, mean_bytes, megabytes
from benchmarks.workload import SMALL, TOY, Workload

CONFIG = SMALL | {"num_hidden_layers": 4}
ELEMENT = 4
"""Bytes of a number in fp32."""


def workload(ranks: int, tp: int) -> Workload:
    """Return the workload of a mesh, with a sequence a rank in all."""
    strategy = {"tp_size": tp} if tp > 1 else {}
    return Workload(config=CONFIG, world=ranks, strategy=strategy, rows_per_rank=tp)


MESHES = {
    2: {"fsdp 2": workload(2, 1), "tp 2": workload(2, 2)},
    4: {"fsdp 4": workload(4, 1), "fsdp 2 x tp 2": workload(4, 2)},
}
QUICK = {"config": TOY, "sequence_length": 32, "steps": 8}


def main() -> None:
    """Run the comparison and write its table."""
    compare_meshes("tensor", __doc__, meshes=MESHES, toy=QUICK, columns=columns)


def columns(workload: Workload, counts: Counts, _: Mapping[str, Counts]) -> dict[str, str | None]:
    """Return the megabytes that a rank moves: in all, and in sums of activations with their ratio to the formula."""
    moved = mean_bytes(counts)
    sums = mean_bytes(counts, "all-reduce") if "tp_size" in workload.strategy else 0.0
    return {
        "moved, MB a rank": f"{moved / 1e6:.2f}",
        "of it all-reduces (to the formula)": megabytes(sums, summed(workload)),
    }


def summed(workload: Workload) -> float:
    """Return the bytes of the sums of activations: four in each layer, one after the embeddings and before the head."""
    config, tp = workload.config, workload.strategy.get("tp_size", 1)
    activations = workload.rows_per_rank * workload.sequence_length * config["hidden_size"]
    return float((4 * config["num_hidden_layers"] + 2) * 2 * activations * (tp - 1) / tp * ELEMENT)


if __name__ == "__main__":
    main()
