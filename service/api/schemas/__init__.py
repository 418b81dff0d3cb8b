"""Request and response models of the REST API. They need pydantic only: the service and the client share them.

`service.api.convert` builds the responses.
"""

from service.api.schemas.access import DeedOut, KeyIn, KeyOut, Keys, Me, NewKey
from service.api.schemas.audit import Findings, RunAuditOut
from service.api.schemas.checkpoints import (
    CheckpointOut,
    Checkpoints,
    DigestsOut,
    ExportIn,
    ExportOut,
    TensorDigestOut,
    Verified,
)
from service.api.schemas.common import (
    Health,
    Level,
    Line,
    LinePage,
    Page,
    ProblemDetails,
    ProblemOut,
    RoleName,
    StateName,
    TextPage,
)
from service.api.schemas.doctor import ExaminationOut, FindingOut
from service.api.schemas.jobs import (
    AttemptOut,
    CancelIn,
    CloneIn,
    JobOut,
    JobPage,
    LineageOut,
    LostWork,
    PauseIn,
    ProgressOut,
    ReasonOut,
    ResumeIn,
)
from service.api.schemas.nodes import NodeFailure, NodeOut, NodesOut
from service.api.schemas.plan import (
    MemoryOut,
    MemoryTermOut,
    MeshOut,
    PlanOut,
    PreviewOut,
    ReductionTreeOut,
    SpellingOut,
)
from service.api.schemas.usage import UsageDays, UsageOut
from service.api.schemas.webhooks import DeliveryOut, NewWebhook, TrialOut, WebhookIn, WebhookOut, WebhooksOut
from service.domain.access.roles import Role
from service.domain.jobs.job import JobState
from train_loop.spec import JobSpec, ScalingSpec, WorkerRange

__all__ = [
    "AttemptOut",
    "CancelIn",
    "CheckpointOut",
    "Checkpoints",
    "CloneIn",
    "DeedOut",
    "DeliveryOut",
    "DigestsOut",
    "ExaminationOut",
    "ExportIn",
    "ExportOut",
    "FindingOut",
    "Findings",
    "Health",
    "JobOut",
    "JobPage",
    "JobSpec",
    "JobState",
    "KeyIn",
    "KeyOut",
    "Keys",
    "Level",
    "Line",
    "LinePage",
    "LineageOut",
    "LostWork",
    "Me",
    "MemoryOut",
    "MemoryTermOut",
    "MeshOut",
    "NewKey",
    "NewWebhook",
    "NodeFailure",
    "NodeOut",
    "NodesOut",
    "Page",
    "PauseIn",
    "PlanOut",
    "PreviewOut",
    "ProblemDetails",
    "ProblemOut",
    "ProgressOut",
    "ReasonOut",
    "ReductionTreeOut",
    "ResumeIn",
    "Role",
    "RoleName",
    "RunAuditOut",
    "ScalingSpec",
    "SpellingOut",
    "StateName",
    "TensorDigestOut",
    "TextPage",
    "TrialOut",
    "UsageDays",
    "UsageOut",
    "Verified",
    "WebhookIn",
    "WebhookOut",
    "WebhooksOut",
    "WorkerRange",
]
