"""Checks of the roles that a call requires. Each raises Forbidden."""

from service.domain.access.roles import ANY, Principal, Role
from service.errors import Forbidden


def require_role(caller: Principal, role: Role, project: str) -> None:
    """Raise Forbidden unless the caller has this role in a project."""
    if not caller.has_role(role, project):
        raise Forbidden(
            f"key {caller.name!r} lacks the role {role} in project {project[:64]!r}; ask an admin of the project for it"
        )


def require_any_editor(caller: Principal) -> None:
    """Raise Forbidden unless the caller is an editor of some project. Needs no body, so it is checked before one."""
    if not caller.edits:
        raise Forbidden(f"key {caller.name!r} is not an editor of any project; ask an admin for the role")


def require_admin(caller: Principal, project: str) -> None:
    """Raise Forbidden unless the caller administers a project, or all projects for ANY."""
    if not caller.has_role(Role.ADMIN, project):
        what = "all projects" if project == ANY else f"project {project!r}"
        raise Forbidden(f"key {caller.name!r} is not an admin of {what}; ask an admin for a key")


def administered(caller: Principal, project: str | None) -> frozenset[str] | None:
    """Return the projects whose admin lists the caller may see: those it administers, or `project`. None means all.

    Raises Forbidden if there is none: an empty list would look as if nothing existed.
    """
    if project is not None:
        require_admin(caller, project)
        return frozenset({project})
    projects = caller.projects(Role.ADMIN)
    if projects is not None and not projects:
        raise Forbidden(
            f"key {caller.name!r} is not an admin of any project; ask an admin of your project for the role"
        )
    return projects
