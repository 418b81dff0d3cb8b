"""`python -m tests.support.servers.quick_service`: the service, with a preflight helper that starts at once.

The real helper imports transformers, which takes five CPU seconds at every start.
"""

import sys
from functools import partial
from unittest.mock import patch

from service import serve
from service.adapters.helper_processes.preflight import HelperPreflight

HELPER = (sys.executable, "-m", "tests.support.servers.quick_preflight")


if __name__ == "__main__":
    with patch("service.backends.HelperPreflight", partial(HelperPreflight, command=HELPER)):
        sys.exit(serve.main())
