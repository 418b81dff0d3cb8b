"""Optimizers: every mesh trains the same weights, and a resumed run equals the uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.builders.specs import TINY, spec
from tests.support.ranks.ranks import on_ranks
from tests.support.ranks.torchrun import load_checkpoint, write_tokens
from train_loop.checkpoint.state_dict import tensors_of
from train_loop.conformance.measure import accumulate_plainly
from train_loop.data.prepare.cache import find_dataset
from train_loop.data.stream.local import StreamPlan, local_stream
from train_loop.loop.batch import StepBatch, micro_batches
from train_loop.loop.build import Run, build_run
from train_loop.loop.session import Session
from train_loop.loop.step import train_step
from train_loop.model.families.anatomy import Fused
from train_loop.optim.muon import Muon
from train_loop.run_dir import RunDir, read_lines
from train_loop.spec import JobSpec
from train_loop.telemetry.timers import StepTimer
from train_loop.train import next_batch, train

STEPS = 3
# Four ranks divide no dimension evenly, and k_norm and q_norm have fewer rows than there are ranks.
UNEVEN = TINY | {"vocab_size": 381, "hidden_size": 34, "intermediate_size": 50, "head_dim": 2}
FROZEN = {"freeze_module_prefix": ["model.embed_tokens", "model.layers.0"], "gradient_checkpointing": "full"}
# Interleaved gates, transposed tensors and biases of experts, of which a rank of four has none.
EXPERTS = {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2}
# Newton-Schulz iterates in bf16, which amplifies a gradient's last bit to 1e-5, on one rank with torch's own too.
TOLERANCE = {"muon": 1e-4}
# A large epsilon: Adam divides a gradient by its own size, even if it is only rounding.
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"adam_beta2": 0.95, "adam_epsilon": 1e-4},
    "sgd": {"momentum": 0.8, "lr_scheduler_type": "wsd", "learning_rate": 0.1},
    "adafactor": {"lr_scheduler_type": "polynomial"},
    "muon": {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4},
    "frozen": {"optimizer": "adamw", "adam_epsilon": 1e-4},
}
MODELS: dict[str, dict[str, Any]] = {
    "frozen": FROZEN | {"config": UNEVEN | {"tie_word_embeddings": True}},
    "muon": {"config": UNEVEN | EXPERTS},
}
LAYOUTS = [((6, 12, 8), Fused(1, alternates=False)), ((6, 8, 12), Fused(2, alternates=True)), ((6, 8, 6), None)]
"""Shapes of tensors of experts, of which a rank of four has none."""
MESHES = {"fsdp": (0, 1), "hsdp": (2, 1)}


def a_spec(data: Path, case: str, fsdp: int, sp: int) -> JobSpec:
    model = MODELS.get(case, {"config": UNEVEN})
    ep = 2 if case == "muon" and dist.get_world_size() == 4 and not fsdp else 1
    training = {"max_steps": STEPS, "global_batch_size": 8, "max_grad_norm": 0.3, "weight_decay": 0.1}
    return spec(
        model={"dtype": "fp32", "gradient_checkpointing": "none"} | model,
        data={"train": {"path": str(data)}, "columns": {"input_ids": "ids"}, "packing": False},
        training=training | {"optimizer": case, "warmup_steps": 1, "ema_decay": 0.9} | CASES[case],
        strategy={"fsdp_size": fsdp, "ulysses_size": sp, "ep_size": ep},
        checkpoint={"every_steps": 2},
        scaling={"num_workers": dist.get_world_size()},
    )


def a_session(folder: Path) -> Session:
    return Session(dist.get_rank(), dist.get_world_size(), 0, 1, RunDir(folder), local_stream)


def train_case(folder: Path, name: str, case: str, mesh: tuple[int, int]) -> None:
    job = a_spec(folder / "d.parquet", case, *mesh)
    train(job, a_session(folder / f"{case} {name}"), find_dataset(job, folder))


def a_run(folder: Path, case: str, mesh: tuple[int, int] = (0, 1)) -> Run:
    job = a_spec(folder / "d.parquet", case, *mesh)
    return build_run(job, a_session(folder / "unused"), find_dataset(job, folder))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def first_batch(run: Run) -> StepBatch:
    rows = local_stream(StreamPlan(run.dataset, run.order, 0, 1), run.mesh.plan, run.mesh.rank)
    return next_batch(run, rows, StepTimer())


def gradients(folder: Path, mesh: tuple[int, int]) -> dict[str, Tensor | None]:
    """Return the gradients of the model with frozen parts, after the samples of one step."""
    run = a_run(folder, "frozen", mesh)
    batch = first_batch(run)
    accumulate_plainly(run.objective, micro_batches(batch, 1, run.objective.anatomy, run.mesh), 1, run.mesh)
    named = run.state.model.named_parameters()
    return {name: None if p.grad is None else whole(p.grad) for name, p in named}


def on_one_rank(folder: Path) -> dict[str, Any]:
    for case in CASES:
        train_case(folder, "one rank", case, (0, 1))
    return {
        "gradients": gradients(folder, (0, 1)),
        "start": {name: whole(p) for name, p in a_run(folder, "frozen").state.model.named_parameters()},
        "saved early": {case: [first_step(a_run(folder, case), saved=saved) for saved in (0, 1)] for case in CASES},
        "skipped": skip_a_step(a_run(folder, "muon")),
    }


def first_step(run: Run, *, saved: int) -> list[Tensor]:
    """Return the weights after one step at a learning rate above 0, with or without an earlier read of the state."""
    for _ in range(saved):
        tensors_of(run.state)
    for scheduler in run.state.schedulers:
        scheduler.step()
    for parameter in run.state.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01) if parameter.requires_grad else None
    run.state.apply_gradients()
    return [whole(parameter) for parameter in run.state.model.parameters()]


def skip_a_step(run: Run) -> list[bool]:
    """Return True if a non-finite step left learning rate, weights, average and moments unchanged."""
    state = run.state
    batch = first_batch(run)
    assert run.objective.anatomy.head is not None
    head = run.objective.anatomy.head.get_parameter("weight")
    with torch.no_grad():
        head.fill_(torch.inf)
    before = {name: whole(average) for name, average in state.ema.averages.items()} if state.ema else {}
    micro = micro_batches(batch, 1, run.objective.anatomy, run.mesh)
    result = train_step(state, run.objective, micro, divisor=1, reduction=run.reduction, max_grad_norm=1.0)
    assert state.ema is not None
    same = [torch.equal(whole(state.ema.averages[name]), average) for name, average in before.items()]
    return [not result.applied, state.lr == 0, not any(o.state for o in state.optimizers), *same]


def on_four_ranks(folder: Path) -> dict[str, Any]:
    """Train every case at every mesh; at the last mesh also resume from step 2 with fresh objects."""
    for case in CASES:
        for name, mesh in MESHES.items():
            train_case(folder, name, case, mesh)
        last, kept = (RunDir(folder / f"{case} {name}").checkpoint(STEPS) for name in ("hsdp", "uninterrupted"))
        if dist.get_rank() == 0:
            kept.parent.mkdir(parents=True)
            last.rename(kept)
        dist.barrier()
        train_case(folder, "hsdp", case, MESHES["hsdp"])
    return {"gradients": gradients(folder, (0, 2)), "muon": sharded_muon()}


def sharded_muon() -> dict[str, tuple[bool, bool]]:
    """Return whether sharded Muon is bit-equal to torch's on whole matrices and on those of experts."""
    shapes = [(16, 12)] * 5 + [(6, 7)] * 2 + [(2, 9)]
    meshes: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "fsdp": (init_device_mesh("cpu", (4,)), [Shard(0)]),
        "hsdp": (init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]),
    }
    expected = muon_steps(torch.optim.Muon, [torch.ones(shape) for shape in shapes], lambda t: t)
    found = {}
    for name, (mesh, placements) in meshes.items():
        start = [distribute_tensor(torch.ones(shape), mesh, placements) for shape in shapes]
        spread = muon_steps(Muon, start, lambda t, m=mesh, p=placements: distribute_tensor(t, m, p))
        experts = muon_of_experts(lambda t, m=mesh, p=placements: distribute_tensor(t, m, p))
        found[name] = all(map(torch.equal, expected, spread)), experts
    return found


def muon_steps(kind: Any, start: list[Any], spread: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(tensor) for tensor in start]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = spread(torch.randn(parameter.shape, generator=draw))
        optimizer.step()
    return [whole(parameter) for parameter in parameters]


def muon_of_experts(spread: Any) -> bool:
    """Return whether Muon of experts is bit-equal to torch's on each matrix of each expert, given equal gradients."""
    draw = torch.Generator().manual_seed(0)
    options: Any = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    starts = [torch.randn(shape, generator=draw) for shape, _ in LAYOUTS]
    experts = [torch.nn.Parameter(spread(start)) for start in starts]
    both = {id(one): fused for one, (_, fused) in zip(experts, LAYOUTS, strict=True) if fused}
    alone = [torch.nn.Parameter(one) for one in matrices(starts)]
    ours, torchs = Muon(experts, **options, fused=both), torch.optim.Muon(alone, **options)
    for _ in range(3):
        gradients = [torch.randn(shape, generator=draw) for shape, _ in LAYOUTS]
        for parameter, gradient in zip(experts, gradients, strict=True):
            parameter.grad = spread(gradient)
        for parameter, gradient in zip(alone, matrices(gradients), strict=True):
            parameter.grad = gradient
        ours.step()
        torchs.step()  # type: ignore[no-untyped-call]
    return all(map(torch.equal, matrices([whole(one) for one in experts]), alone))


def matrices(tensors: list[Tensor]) -> list[Tensor]:
    """Return the matrices of tensors of experts."""
    pairs = zip(tensors, LAYOUTS, strict=True)
    parts = [part for tensor, (_, fused) in pairs for part in (fused.split(tensor) if fused else (tensor,))]
    return [matrix.clone(memory_format=torch.contiguous_format) for part in parts for matrix in part]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    # Rows shorter than the sequence, so that data ranks differ in the tokens they train.
    write_tokens(folder / "d.parquet", rows=40, length=(9, 32), vocab=UNEVEN["vocab_size"])
    return folder, on_ranks(1, on_one_rank, folder)[0], on_ranks(4, on_four_ranks, folder)[0]


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested values, with one name each."""
    if not isinstance(values, dict | list | tuple):
        return {path: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    return {name: leaf for key, value in items for name, leaf in flat(value, f"{path}/{key}").items()}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_every_mesh_trains_the_same_weights_and_averages(runs: Any, case: str, mesh: str) -> None:
    expected, found = (load_checkpoint(runs[0] / f"{case} {name}", STEPS) for name in ("one rank", mesh))
    for part in ("model", "ema"):
        assert found[part].keys() == expected[part].keys()
        for name, weight in expected[part].items():
            difference = (found[part][name] - weight).norm() / weight.norm()
            assert difference <= TOLERANCE.get(case, 1e-5), (part, name, float(difference))


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_is_bit_equal(runs: Any, case: str) -> None:
    expected, found = (flat(load_checkpoint(runs[0] / f"{case} {name}", STEPS)) for name in ("uninterrupted", "hsdp"))
    events = read_lines(RunDir(runs[0] / f"{case} hsdp").attempt(1).events)
    assert [e["resumed_from"] for e in events if e["event"] == "training_started"] == [0, 2]
    assert found.keys() == expected.keys()
    assert {"/model", "/optimizer", "/ema", "/scheduler"} <= {f"/{name.split('/')[1]}" for name in found}
    # Without the generators: only the libraries that save draw from them here.
    for name in [name for name in expected if not name.startswith("/rng")]:
        (a, b) = (found[name], expected[name])
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b, name


def test_muon_is_bit_equal_to_torchs_on_whole_matrices(runs: Any) -> None:
    assert runs[2]["muon"] == {"fsdp": (True, True), "hsdp": (True, True)}


def test_frozen_parameters_stay_and_have_no_moments(runs: Any) -> None:
    folder, alone, _ = runs
    final = load_checkpoint(folder / "frozen fsdp", STEPS)
    frozen = [name for name in alone["start"] if name.startswith(tuple(FROZEN["freeze_module_prefix"]))]
    assert "model.embed_tokens.weight" in frozen
    for name, weight in alone["start"].items():
        assert torch.equal(final["model"][name], weight) == (name in frozen), name
        assert (name in final["optimizer"]["state"]) == (name not in frozen), name
        assert (name in final["ema"]) == (name not in frozen), name


def test_weight_averages_of_a_checkpoint_can_be_exported(runs: Any, tmp_path: Path) -> None:
    final = load_checkpoint(runs[0] / "frozen fsdp", STEPS)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**UNEVEN))
    model.load_state_dict(final["model"])
    # Written over the weights: frozen ones have no average.
    assert model.load_state_dict(final["ema"], strict=False).unexpected_keys == []
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in final["model"].items():
        assert torch.equal(loaded[name], final["ema"].get(name, weight)), name


def test_gradients_with_frozen_parameters_equal_one_rank(runs: Any) -> None:
    _, alone, spread = runs
    for name, expected in alone["gradients"].items():
        found = spread["gradients"][name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            assert (found - expected).norm() <= 1e-5 * expected.norm(), name
    assert any(gradient is None for gradient in alone["gradients"].values())


def test_state_read_before_the_first_step_changes_nothing(runs: Any) -> None:
    for case, (unread, read) in runs[1]["saved early"].items():
        assert all(map(torch.equal, unread, read)), case


def test_skipped_step_keeps_schedule_average_and_moments(runs: Any) -> None:
    assert all(runs[1]["skipped"])


def test_parameter_groups_are_reported(runs: Any) -> None:
    (started,) = [
        event
        for event in read_lines(RunDir(runs[0] / "muon fsdp").attempt(1).events)
        if event["event"] == "training_started"
    ]
    groups = [(group["optimizer"], group["weight_decay"], group["tensors"]) for group in started["parameter_groups"]]
    assert groups == [("Muon", 0.1, 14), ("AdamW", 0.1, 2), ("AdamW", 0.0, 21)]
    assert {group["lr"] for group in started["parameter_groups"]} == {1e-4}
