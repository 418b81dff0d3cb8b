"""Remedies of the REST API, as the command prints them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from service.errors import (
    CheckpointNotFound,
    DeliveryNotFound,
    ExportNotFound,
    JobNotFound,
    KeyNotFound,
    WebhookNotFound,
)
from trainshed.cli.connect import in_commands

MESSAGE = re.compile(r"\b(?:GET|POST|PUT|PATCH|DELETE) /[\w./{}]+|POST to the same path")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, with an x in the place of each formatted value."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in tree.values)
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    elif not (isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant)):
        # A string that stands alone is documentation.
        for node in ast.iter_child_nodes(tree):
            yield from texts(node)


def test_no_message_of_the_service_leaves_a_rest_call() -> None:
    files = (file for name in ("service", "train_loop") for file in Path(name).rglob("*.py"))
    calls = {call for file in files for text in texts(ast.parse(file.read_text())) for call in MESSAGE.findall(text)}
    assert len(calls) >= 6
    assert sorted(call for call in calls if MESSAGE.search(in_commands(call))) == []


def test_commands_keep_the_ids_of_their_calls() -> None:
    errors = [JobNotFound("job-1"), KeyNotFound("key-1"), WebhookNotFound("hook-1"), DeliveryNotFound("hook-1", 3)]
    errors += [CheckpointNotFound("job-1", 7), ExportNotFound(7)]
    assert [in_commands(str(error)).rpartition(" with ")[2] for error in errors] == [
        "`trainshed ps`",
        "`trainshed keys ls`",
        "`trainshed webhooks ls`",
        "`trainshed webhooks deliveries hook-1`",
        "`trainshed checkpoints job-1`",
        "`trainshed export`",
    ]
