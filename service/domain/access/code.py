"""The operator's choice of projects whose specs may bring their own code."""

from dataclasses import dataclass

from service.domain.access.roles import ANY
from train_loop.spec import AnyJobSpec, Problem


@dataclass(frozen=True)
class CodePolicy:
    """The projects that may run their own code, which has the rights of the workers."""

    projects: frozenset[str] = frozenset()
    """Names of projects; "*" stands for all."""

    def allows(self, project: str) -> bool:
        """Return whether jobs of a project may run their own code."""
        return not self.projects.isdisjoint({project, ANY})

    def problem(self, spec: AnyJobSpec) -> Problem | None:
        """Return why a spec may not be submitted with its code; None if it may, or has none."""
        if spec.code is None or self.allows(spec.project):
            return None
        return Problem(
            "/code",
            f"project {spec.project} may not run its own code; ask the operator to add it to TRAINSHED_ALLOW_CODE, or "
            "remove code",
        )
