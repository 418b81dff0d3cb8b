"""What ranks of tests have imported before they are forked."""

import train_loop.checkpoint.load
import train_loop.worker  # noqa: F401
