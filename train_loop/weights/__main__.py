"""`python -m train_loop.weights IN OUT`: convert weights to a folder with safetensors.

Prints one JSON document: the result, or {"error": …}.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from train_loop.errors import CheckpointError, UserError
from train_loop.weights.convert import MEMORY_MIB, SHARD_BYTES, Options, convert


def main() -> int:
    """Convert weights. Return 0, or 1 after printing the reason for a failure."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.weights", description=__doc__)
    parser.add_argument("source", metavar="IN", type=Path, help="file of torch.save, or a folder with weights")
    parser.add_argument("target", metavar="OUT", type=Path, help="new folder")
    parser.add_argument("--entry", help="key of the state dict in the file, if it has several")
    parser.add_argument("--config", type=Path, help="model folder or run directory with config and tokenizer")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="maximum bytes per file [%(default)s]")
    parser.add_argument(
        "--memory-mib", type=int, default=MEMORY_MIB, help="memory to read with, besides mapped files [%(default)s]"
    )
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    options = Options(given.entry, given.config, given.shard_bytes, given.memory_mib)
    try:
        done = convert(given.source.absolute(), given.target.absolute(), options)
    except (UserError, CheckpointError, OSError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(done.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
