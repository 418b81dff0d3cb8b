"""The JSON schema of the job spec, for editors and validators."""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from train_loop.spec.job import JobSpec

SCHEMA_ID = "urn:trainshed:job-spec"


class _Generator(GenerateJsonSchema):
    """A generator without titles of fields: they repeat the fields' names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def job_schema() -> dict[str, Any]:
    """Return the JSON schema of a job spec, with descriptions, defaults and limits of every field.

    It cannot express the rules between fields; `parse` checks those, too.
    """
    schema = JobSpec.model_json_schema(schema_generator=_Generator)
    # Editors show the schema's own name.
    head = {"$schema": GenerateJsonSchema.schema_dialect, "$id": SCHEMA_ID, "title": "Trainshed job spec"}
    return {**head, **{name: part for name, part in schema.items() if name not in head}}


def dump_schema() -> str:
    """Return the JSON schema of a job spec as text."""
    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"
