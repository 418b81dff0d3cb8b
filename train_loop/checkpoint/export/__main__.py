"""`python -m train_loop.checkpoint.export`: exports a checkpoint as a Hugging Face folder."""

import sys

from train_loop.checkpoint.export.huggingface import main

if __name__ == "__main__":
    sys.exit(main())
