"""Hooks of schemathesis (SCHEMATHESIS_HOOKS): examples of existing objects, and a log of every response."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import schemathesis

from tests.support.clients.examples import ANSWERS, EXAMPLES, Examples
from train_loop.spec import SpecError, parse_text, spellings

_REFUSED = itertools.count()
_NTH = 1 if os.environ.get("MORE") else 10
"""Every n-th spec that the service's parser refuses here is sent, and all specs that it accepts."""
_STARTS_A_PROCESS = (
    "get /jobs/{job_id}/checkpoints/{step}/digests",
    "get /jobs/{job_id}/results",
    "post /jobs/{job_id}/checkpoints/{step}/verify",
)


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    """Set examples with which a call succeeds; random values seldom do."""
    examples: Examples = json.loads(Path(os.environ[EXAMPLES]).read_bytes())
    for path, methods in raw_schema["paths"].items():
        for method, operation in methods.items():
            known: dict[str, Any] = {}
            for which in ("*", *(name for name in examples if name[0] == "{" and name in path), f"{method} {path}"):
                known |= examples.get(which, {})
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and parameter["name"] in known:
                    parameter["example"] = known[parameter["name"]]
            if "body" in known:
                for content in operation["requestBody"]["content"].values():
                    content["example"] = known["body"]
    # One reader reads both, and submit receives YAML.
    del raw_schema["paths"]["/jobs/plan"]["post"]["requestBody"]["content"]["application/yaml"]


@schemathesis.hook
def filter_case(context: schemathesis.HookContext, case: schemathesis.Case[Any]) -> bool:
    """Leave out specs in other spellings, which the document does not have, and repetitions in the coverage phase.

    Repetitions are most refused specs, and a second call that starts a process.
    """
    if _call(case) in ("post /jobs", "post /jobs/plan") and isinstance(case.body, dict) and spellings(case.body):
        return False
    if case.meta is None or case.meta.phase.name != "coverage":
        return True
    if _call(case) == "post /jobs/plan" and _is_refused(case.body):
        return next(_REFUSED) % _NTH == 0
    kind = str(getattr(case.meta.phase.data, "scenario", ""))
    # These read no body, so its content type changes nothing.
    return not (_call(case) in _STARTS_A_PROCESS and kind == "malformed_content_type")


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    """Start a chain of calls with a valid body, so that later calls can continue it."""
    if case.meta is None or case.meta.phase.name != "stateful" or case.meta.generation.mode.is_negative:
        return
    known = json.loads(Path(os.environ[EXAMPLES]).read_bytes()).get(_call(case), {})
    if "body" in known:
        case.body = known["body"]


@schemathesis.hook
def after_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], response: schemathesis.Response
) -> None:
    """Log the result of a call."""
    with Path(os.environ[ANSWERS]).open("a") as file:
        print(response.status_code, _call(case), file=file)


def _is_refused(body: Any) -> bool:
    """Return whether the parser refuses a spec as it should; the service tells of one at which it fails."""
    try:
        parse_text(json.dumps(body).encode())
    except SpecError:
        return True
    except Exception:
        return False
    return False


def _call(case: schemathesis.Case[Any]) -> str:
    return f"{case.operation.method.lower()} {case.operation.path}"
