"""The job spec: the one contract between users, service and workers. Torch-free."""

from train_loop.spec.base import Problem, SpecError
from train_loop.spec.checkpoint import CheckpointSpec
from train_loop.spec.code import CodeSpec
from train_loop.spec.data import ColumnsSpec, DataSpec, SourceSpec, check_source
from train_loop.spec.heads import EmbeddingSpec, LabelHeadSpec
from train_loop.spec.job import JobSpec
from train_loop.spec.kinds.any_kind import AnyJobSpec, with_lora
from train_loop.spec.kinds.generation import GenerationSpec
from train_loop.spec.kinds.infer import InferJobSpec
from train_loop.spec.kinds.model import CheckpointSource
from train_loop.spec.kinds.outputs import InferSpec
from train_loop.spec.masked import MASKED_LM, MaskedLmSpec
from train_loop.spec.model import ALL_LINEAR, BudgetSpec, Checkpointing, EverySpec, LoraSpec, ModelSpec
from train_loop.spec.names import AUTO, DTYPES, NODE, Spelling
from train_loop.spec.optimizer import SCHEDULE_FREE, WITHOUT_FOLDER, OptimizerSpec, ParameterGroupSpec
from train_loop.spec.parse import (
    SCHEMA_ID,
    check_mapping,
    dump,
    dump_schema,
    job_schema,
    load,
    merged,
    override,
    parse,
    parse_any,
    parse_any_text,
    parse_text,
    spellings,
)
from train_loop.spec.scaling import MEMORY, MOST_WORKERS, FailureSpec, ScalingSpec, WorkerRange
from train_loop.spec.strategy import SaveMode, StrategySpec, WrapPolicySpec
from train_loop.spec.text import Position, add_positions, as_pointer, describe, locate, read_positions, read_yaml
from train_loop.spec.text.printable import refuse_hidden, show, show_json
from train_loop.spec.training import ReductionTreeSpec, RouterAuxLossSpec, TrainingSpec

__all__ = [
    "ALL_LINEAR",
    "AUTO",
    "DTYPES",
    "MASKED_LM",
    "MEMORY",
    "MOST_WORKERS",
    "NODE",
    "SCHEDULE_FREE",
    "SCHEMA_ID",
    "WITHOUT_FOLDER",
    "AnyJobSpec",
    "BudgetSpec",
    "CheckpointSource",
    "CheckpointSpec",
    "Checkpointing",
    "CodeSpec",
    "ColumnsSpec",
    "DataSpec",
    "EmbeddingSpec",
    "EverySpec",
    "FailureSpec",
    "GenerationSpec",
    "InferJobSpec",
    "InferSpec",
    "JobSpec",
    "LabelHeadSpec",
    "LoraSpec",
    "MaskedLmSpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParameterGroupSpec",
    "Position",
    "Problem",
    "ReductionTreeSpec",
    "RouterAuxLossSpec",
    "SaveMode",
    "ScalingSpec",
    "SourceSpec",
    "SpecError",
    "Spelling",
    "StrategySpec",
    "TrainingSpec",
    "WorkerRange",
    "WrapPolicySpec",
    "add_positions",
    "as_pointer",
    "check_mapping",
    "check_source",
    "describe",
    "dump",
    "dump_schema",
    "job_schema",
    "load",
    "locate",
    "merged",
    "override",
    "parse",
    "parse_any",
    "parse_any_text",
    "parse_text",
    "read_positions",
    "read_yaml",
    "refuse_hidden",
    "show",
    "show_json",
    "spellings",
    "with_lora",
]
