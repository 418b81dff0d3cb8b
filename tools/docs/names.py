"""The reference of names of other tools, from the table in the code."""

from tools.docs.markdown import code, sentence, table
from train_loop.spec.names.spellings import DTYPES, REWRITTEN, SHARDING
from train_loop.spec.names.table import NAMES, OtherName

_HEADINGS = {
    "field": ("## Names with a field of the same meaning", ("name", "field")),
    "not_needed": ("## Names without a field", ("name", "reason")),
    "absent": ("## Names of features that are absent", ("name", "feature")),
}


def page() -> str:
    """Return the Markdown of the page."""
    dtypes = [(code(name), code(dtype)) for name, dtype in DTYPES.items()]
    strategies = [
        (code(name), code(str(number)), ", ".join(code(f"{field}: {_yaml(value)}") for field, value in _became(name)))
        for number, name in enumerate(SHARDING, start=1)
    ]
    others = ", ".join(code(f"{section}.{name}") for section, name in REWRITTEN)
    parts = [
        "# Names of other tools\n\nA spec may use these spellings. The plan lists each with its canonical form, and "
        'jobs store that. Numbers may be text, as `"1e-4"`. Fields with more spellings, or that become '
        f"other fields: {others}. [Job specs](../guides/spec.md#names-of-other-tools) explains them.\n",
        "## Spellings of dtypes\n",
        table(("written", "dtype"), dtypes),
        "## Strategies of FSDP1\n\nNames may be in lower case or begin with `ShardingStrategy.`. Accelerate's numbers "
        "are accepted, too.\n",
        table(("sharding_strategy", "number", "fields"), strategies),
    ]
    for kind, (heading, head) in _HEADINGS.items():
        known = sorted((name, one) for name, one in NAMES.items() if one.kind == kind)
        parts += [f"{heading}\n", table(head, [(code(name), _meaning(one)) for name, one in known])]
    return "\n".join(parts)


def _became(name: str) -> list[tuple[str, object]]:
    own = "NO_SHARD" if name == "NO_SHARD" else "FULL_SHARD"
    return [("sharding_strategy", own), *SHARDING[name].items()]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _meaning(name: OtherName) -> str:
    if name.kind != "field":
        return sentence(name.meaning)
    note = name.meaning.partition("; ")[2]
    fields = ", ".join(map(code, name.fields))
    return f"{fields}: {note}" if note else fields
