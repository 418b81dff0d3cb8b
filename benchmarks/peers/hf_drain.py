"""A full read of a map-style `datasets` with torch's DataLoader: `-m benchmarks.peers.hf_drain OUT FOLDER BATCH`."""

import json
import sys
from pathlib import Path

from datasets import Dataset
from torch.utils.data import DataLoader

from benchmarks.data.streams import ARROW, CORES, rate


def main() -> None:
    """Read a shuffled epoch and write the rows/s."""
    out, folder, batch = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    samples = Dataset.from_file(str(folder / ARROW)).with_format("torch")
    batches = DataLoader(samples, batch_size=batch, shuffle=True, num_workers=CORES)
    found = rate((len(rows["input_ids"]) for rows in batches), of=len(samples))
    out.write_text(json.dumps({"rates": [found], "rows_per_second": found}))


if __name__ == "__main__":
    main()
