"""Settings from the environment, with one line per invalid or unknown variable."""

import sys

from service.cli.ends import fail
from service.config.address import find_url
from service.config.environment import BadSettings, read_settings, strangers
from service.config.settings import Settings
from train_loop.spec import show


def settings() -> Settings:
    """Return the settings and warn about unknown variables. Exits with one line per invalid variable and code 1."""
    for line in strangers():
        print(f"trainshed: warning: {show(line)}", file=sys.stderr)
    try:
        find_url()
        return read_settings()
    except BadSettings as error:
        fail("invalid configuration", error.problems)
