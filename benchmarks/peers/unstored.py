"""Our service with a pause in the place of every commit: what an accept costs besides its row."""

import sys
import time
from unittest.mock import patch

from service import serve
from service.adapters.sql.store import SqlJobStore

COMMIT_SECONDS = 0.0003
"""What a commit of some jobs takes where nothing else runs."""


def main() -> int:
    """Serve; what is accepted is forgotten."""
    with patch.object(SqlJobStore, "_add_all", lambda store, added: time.sleep(COMMIT_SECONDS)):
        return serve.main()


if __name__ == "__main__":
    sys.exit(main())
