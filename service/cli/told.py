"""What the environment tells the command, with a line for what in it makes no sense."""

import sys

from service.address import find_url
from service.cli.ends import fail
from service.environment import BadSettings, read_settings, strangers
from service.settings import Settings
from train_loop.spec import show


def settings() -> Settings:
    """The settings. Ends the command with a line for each that cannot be, and exit code 1."""
    for line in strangers():
        print(f"trainshed: warning: {show(line)}", file=sys.stderr)
    try:
        find_url()
        return read_settings()
    except BadSettings as error:
        fail("the environment says what cannot be", error.problems)
