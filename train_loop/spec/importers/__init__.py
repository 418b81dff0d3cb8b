"""Configurations of other tools → job specs, with a report of each field. Torch-free."""

from train_loop.spec.importers.assemble import SourceError, SourceFile, import_files
from train_loop.spec.importers.report import Imported, Outcome, Row

__all__ = ["Imported", "Outcome", "Row", "SourceError", "SourceFile", "import_files"]
