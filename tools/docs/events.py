"""The reference of events, from the list in the code."""

from tools.docs.markdown import code, sentence, table
from train_loop.telemetry.events import EVENTS


def page() -> str:
    """Return the Markdown of the page."""
    rows = [(code(name), sentence(meaning)) for name, meaning in EVENTS.items()]
    return (
        "# Events\n\n"
        "`GET /jobs/{id}/events`, `trainshed events JOB` and `attempts/<n>/events.jsonl` contain these events. Each "
        "line has `time` (Unix seconds, UTC), `event`, `attempt`, and `epoch`, the fencing epoch of the worker group, "
        "if there is one. Further fields depend on the event.\n\n" + table(("event", "meaning"), rows)
    )
