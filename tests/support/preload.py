"""What ranks of tests have imported before they are forked, and never look through for garbage."""

import train_loop.checkpoint.load
import train_loop.worker  # noqa: F401
from train_loop.garbage import keep_what_is_there

keep_what_is_there()
