"""The report of an import: each field of the source, what became of it, and why."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, JsonValue


class Outcome(StrEnum):
    """The fate of a field of a source."""

    TAKEN = "taken"
    """A field of the spec has its value."""
    TRANSLATED = "translated"
    """A field of the spec has the same meaning, or the nearest one, under another value."""
    DEFAULT = "default"
    """The source does not set it; the spec has the source's own default."""
    NEEDED = "needed"
    """The spec has a value that the user replaces, such as the path of a folder."""
    DIFFERS = "differs"
    """The loop itself computes other numbers; no field of the source says so."""
    NOT_NEEDED = "not needed"
    """Nothing is lost without it."""
    NOT_SUPPORTED = "not supported"
    """The job does without it."""
    NOT_IMPORTED = "not imported"
    """It belongs to something else than the imported worker."""
    UNKNOWN = "unknown"
    """The importer does not know it."""


class Row(BaseModel):
    """One field of the source, or of the spec alone if `field` is empty."""

    model_config = ConfigDict(frozen=True)

    field: str
    """Dotted path in the source, also of a field whose default counts; empty if the source has no such field."""
    value: JsonValue = None
    outcome: Outcome
    target: str | None = None
    """Dotted path in the spec."""
    written: JsonValue = None
    """Value in the spec."""
    reason: str = ""
    changes_numbers: bool = False
    """True if the run computes other numbers than the source's tool, or than the spec's own default would."""


class Imported(BaseModel):
    """A spec from configurations of other tools, and the report of all their fields."""

    model_config = ConfigDict(frozen=True)

    formats: tuple[str, ...]
    """Names of the formats, one for each file: `ROLL, worker sft_train`."""
    spec: dict[str, JsonValue]
    rows: tuple[Row, ...]

    @property
    def needed(self) -> tuple[Row, ...]:
        """The values that the user replaces."""
        return tuple(row for row in self.rows if row.outcome is Outcome.NEEDED)

    @property
    def changes(self) -> tuple[Row, ...]:
        """The rows that change numbers, except values to replace."""
        return tuple(row for row in self.rows if row.changes_numbers and row.outcome is not Outcome.NEEDED)
