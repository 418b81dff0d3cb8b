"""A step of a mixture of experts with its real router: Trainshed against transformers' own plans, in the same ranks.

`python -m benchmarks.training.experts [--ranks 2|4] [--rounds N] [--quick]`. Both use grouped matrix products, one
mesh, the same rows and AdamW, and clip gradients. Ranks have experts of their own (`ep_size`) or shards of all. The
table has the seconds of both, the load of the slowest rank, and the bytes that a rank moves for experts.
"""

from collections.abc import Mapping

import numpy as np

from benchmarks.training.meshes import Counts, compare_meshes, mean_bytes, megabytes
from benchmarks.workload import SMALL_MIXTURE, TOY_MIXTURE, Workload

ELEMENT = 4
"""Bytes of a number in fp32."""


def workload(ranks: int, **strategy: int) -> Workload:
    """Return the workload of a mesh."""
    return Workload(config=SMALL_MIXTURE, world=ranks, strategy=strategy, steps=14, first_counted=4)


MESHES = {
    2: {"fsdp 2": workload(2), "fsdp 2, ep 2": workload(2, ep_size=2)},
    4: {"fsdp 4": workload(4), "fsdp 4, ep 2": workload(4, ep_size=2), "fsdp 4, ep 4": workload(4, ep_size=4)},
}
QUICK = {"config": TOY_MIXTURE, "sequence_length": 32, "steps": 8}


def main() -> None:
    """Run the comparison and write its table."""
    compare_meshes("experts", __doc__, meshes=MESHES, toy=QUICK, columns=columns)


def columns(workload: Workload, counts: Counts, all_counts: Mapping[str, Counts]) -> dict[str, str | None]:
    """Return the slowest rank's load, and the megabytes for experts with their ratio to the formulas."""
    gathers = expert_gathers(workload, counts, all_counts)
    return {
        "slowest rank's rows, to the mean": f"{slowest(counts):.3f}",
        "all-to-alls, MB a rank (to the formula)": megabytes(mean_bytes(counts, "all-to-all"), exchanged(workload)),
        "shards of experts, MB a rank (to the formula)": megabytes(gathers, sharded(workload)),
    }


def slowest(counts: Counts) -> float:
    """Return the rows of the slowest rank over the mean of all, summed over the products of a step."""
    rows = np.array([rank["rows"] for rank in counts])
    return float(rows.max(0).sum() / rows.mean(0).sum())


def exchanged(workload: Workload) -> float:
    """Return the bytes of all-to-alls for a balanced router: tokens go to their experts and back, also in backward."""
    config, ep = workload.config, workload.strategy.get("ep_size", 1)
    tokens = workload.rows_per_rank * workload.sequence_length * config["num_experts_per_tok"]
    return float(4 * config["num_hidden_layers"] * tokens * config["hidden_size"] * (ep - 1) / ep * ELEMENT)


def sharded(workload: Workload) -> float:
    """Return the bytes of two gathers and a reduce-scatter of the experts that a rank computes."""
    config, ep = workload.config, workload.strategy.get("ep_size", 1)
    shards = workload.world // ep
    weights = 3 * config["num_experts"] * config["hidden_size"] * config["moe_intermediate_size"] / ep
    return float(3 * config["num_hidden_layers"] * weights * (shards - 1) / shards * ELEMENT)


def expert_gathers(workload: Workload, counts: Counts, all_counts: Mapping[str, Counts]) -> float:
    """Return the measured bytes of `sharded`: those beyond a mesh that shards no expert."""
    whole = next((found for mesh, found in all_counts.items() if mesh.endswith(f"ep {workload.world}")), None)
    kinds = ("all-gather", "reduce-scatter")
    return mean_bytes(counts, *kinds) - mean_bytes(whole, *kinds) if whole else 0.0


if __name__ == "__main__":
    main()
