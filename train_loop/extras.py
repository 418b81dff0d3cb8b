"""Packages that Trainshed imports only when a setting asks for them, and how to install each.

It imports nothing else, so that also an installation that lacks packages can say which.
"""

from pathlib import Path

EXTRAS = {
    "peft": "lora",
    "torchao": "torchao",
    "s3fs": "s3",
    "mlflow": "mlflow",
    "wandb": "wandb",
    "psycopg": "postgres",
    "opentelemetry": "otel",
    "tensorboard": "tensorboard",
    "tensorboardX": "train",
    "torch": "train",
    "uvicorn": "service",
    "typer": "cli",
}
"""The extra of pyproject.toml that installs each package, by the name under which it is imported."""
_STORAGE = {"s3": "s3fs", "s3a": "s3fs"}
_ROOT = Path(__file__).parents[1]


def install(package: str) -> str:
    """Return the command that installs a package of EXTRAS for this copy of Trainshed, which may be a clone."""
    extra = EXTRAS[package]
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]' in {_ROOT}"
    return f"pip install 'trainshed[{extra}]'"


def cannot_import(user: str, package: str, error: ImportError) -> str:
    """Return the message for a setting, `user`, whose package is missing or damaged, with the command that helps."""
    return f"{user} needs {package}, which cannot be imported here ({error}); run {install(package)}"


def install_storage(scheme: str) -> str:
    """Return the command that installs the package of a URI's scheme, such as s3; fsspec's own error names others."""
    return f"run {install(_STORAGE[scheme])}" if scheme in _STORAGE else "install the package that fsspec names for it"
