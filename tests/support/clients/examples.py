"""Environment variables and format of the files that the hooks of schemathesis read and write."""

from typing import Any

EXAMPLES, ANSWERS = "DESCRIBED_EXAMPLES", "DESCRIBED_ANSWERS"
"""Environment variables: a JSON file of values by call and place, and the file for lines of `<status> <method> <path>`.

Values for `<method> <path>` override those for a `{NAME}` in the path, which override those for `*`. A place is `body`,
or the name of a parameter in the path.
"""
Examples = dict[str, dict[str, Any]]
