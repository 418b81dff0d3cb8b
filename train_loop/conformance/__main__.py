"""`python -m train_loop.conformance`: check the package of the spec on standard input.

Prints a JSON line for each guarantee on standard output, or {"error": …} if nothing can be checked.
"""

import json
import logging
import os
import sys

from train_loop.conformance.guarantees import check
from train_loop.errors import UserError
from train_loop.spec import parse_text


def main() -> None:
    """Check the guarantees of the package, with the output of its code on standard error."""
    spec = parse_text(sys.stdin.buffer.read())
    answers = os.fdopen(os.dup(1), "w")
    # Users' code may print.
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    try:
        for finding in check(spec):
            print(finding.model_dump_json(), file=answers, flush=True)
    except (UserError, OSError) as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
