"""Parameter groups by pattern and by layer: settings, sizes, refusals, and schedules of each group's rate."""

from typing import Any

import pytest

from tests.support.builders.specs import TINY, code_spec, may_read, raw_spec, spec
from tests.support.families.families import small
from train_loop.errors import ModelError
from train_loop.model.families.causal.family import CAUSAL
from train_loop.model.freeze import freeze
from train_loop.optim import build_optimizers, build_scheduler, describe_groups, plan_groups
from train_loop.optim.groups import parameter_groups
from train_loop.plan import plan_job
from train_loop.plan.built.choices import planned_choices
from train_loop.preflight.model import check_model
from train_loop.spec import JobSpec, ModelSpec, SpecError, parse

LAYERS = TINY["num_hidden_layers"]


def job_of(config: dict[str, Any] = TINY, frozen: tuple[str, ...] = (), **training: Any) -> JobSpec:
    model = {"config": config, "freeze_module_prefix": list(frozen)}
    return spec(model=model, training={"weight_decay": 0.1, "learning_rate": 1e-3} | training)


def settings(job: JobSpec) -> dict[str, tuple[float, float, tuple[float, float] | None]]:
    """Return learning rate, decay and betas of each trained parameter, by name."""
    anatomy = CAUSAL.build(job.model)
    freeze(anatomy.model, job.model.freeze_module_prefix)
    names = {id(p): name for name, p in anatomy.model.named_parameters()}
    groups = parameter_groups(anatomy, job.training)
    found = {names[id(p)]: (one.lr, one.weight_decay, one.betas) for one in groups for p in one.parameters}
    assert len(found) == sum(len(one.parameters) for one in groups)
    assert found.keys() == {name for name, p in anatomy.model.named_parameters() if p.requires_grad}
    return found


def test_last_group_that_matches_counts() -> None:
    found = settings(
        job_of(
            groups=[
                {"params": ["model.layers"], "lr_scale": 0.5, "weight_decay": 0.2},
                {"params": ["*.q_proj.*", "lm_head"], "learning_rate": 0.25, "betas": [0.8, 0.9]},
                {"params": ["model.layers.1.self_attn.q_proj.weight"], "weight_decay": 0.0},
            ]
        )
    )
    assert found["model.embed_tokens.weight"] == (1e-3, 0.1, None)
    assert found["model.norm.weight"] == (1e-3, 0.0, None)
    assert found["lm_head.weight"] == (0.25, 0.1, (0.8, 0.9))
    assert found["model.layers.0.self_attn.q_proj.weight"] == (0.25, 0.1, (0.8, 0.9))
    assert found["model.layers.1.self_attn.q_proj.weight"] == (1e-3, 0.0, None)
    # A group's own decay holds for norms, too.
    assert found["model.layers.0.input_layernorm.weight"] == (5e-4, 0.2, None)
    assert found["model.layers.0.mlp.up_proj.weight"] == (5e-4, 0.2, None)


def test_layer_decay_is_the_rule_of_beit() -> None:
    found = settings(job_of(layer_decay=0.5))

    def scale_of(name: str) -> float:
        # BEiT: the embeddings are layer 0, block i layer i + 1, and the head layer L + 1.
        if name.startswith("model.embed_tokens"):
            layer = 0
        elif name.startswith("model.layers."):
            layer = int(name.split(".")[2]) + 1
        else:
            layer = LAYERS + 1
        return float(0.5 ** (LAYERS + 1 - layer))

    assert {name: rate for name, (rate, _, _) in found.items()} == {name: 1e-3 * scale_of(name) for name in found}


def test_group_scales_or_replaces_the_rate_of_its_layer() -> None:
    groups = [{"params": ["*.q_proj.weight"], "lr_scale": 4.0}, {"params": ["*.k_proj.weight"], "learning_rate": 0.25}]
    found = settings(job_of(layer_decay=0.5, groups=groups))
    assert [found[f"model.layers.{layer}.self_attn.q_proj.weight"][0] for layer in (0, 1)] == [1e-3, 2e-3]
    assert [found[f"model.layers.{layer}.self_attn.k_proj.weight"][0] for layer in (0, 1)] == [0.25, 0.25]


def test_tied_embeddings_match_by_either_name_and_are_before_the_layers() -> None:
    tied = TINY | {"tie_word_embeddings": True}
    assert settings(job_of(tied, layer_decay=0.5))["model.embed_tokens.weight"][0] == 1e-3 * 0.5 ** (LAYERS + 1)
    found = settings(job_of(tied, groups=[{"params": ["lm_head"], "lr_scale": 3.0}]))
    assert found["model.embed_tokens.weight"][0] == pytest.approx(3e-3)


def test_groups_match_experts() -> None:
    found = settings(job_of(small("gpt_oss"), groups=[{"params": ["*.experts", "*.router"], "lr_scale": 0.1}]))
    scaled = {name.rpartition("mlp.")[2] for name, (rate, _, _) in found.items() if rate < 1e-3}
    assert scaled == {
        *("experts.gate_up_proj", "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias"),
        *("router.weight", "router.bias"),
    }


def test_muon_and_its_adamw_have_the_rates_of_groups() -> None:
    job = job_of(
        optimizer="muon",
        groups=[{"params": ["model.layers.0"], "lr_scale": 2.0}, {"params": ["lm_head"], "learning_rate": 0.5}],
    )
    described = describe_groups(build_optimizers(CAUSAL.build(job.model), job.training))
    shown = [(one["optimizer"], one["name"], one["lr"], one["weight_decay"], one["tensors"]) for one in described]
    assert shown == [
        ("Muon", "others", 1e-3, 0.1, 7),
        ("Muon", "model.layers.0", 2e-3, 0.1, 7),
        ("AdamW", "others", 1e-3, 0.1, 1),
        ("AdamW", "others", 1e-3, 0.0, 5),
        ("AdamW", "model.layers.0", 2e-3, 0.0, 4),
        ("AdamW", "lm_head", 0.5, 0.1, 1),
    ]


def test_groups_of_plan_are_those_of_the_run() -> None:
    job = job_of(frozen=("model.layers.0",), layer_decay=0.5, groups=[{"params": ["lm_head"], "betas": [0.8, 0.9]}])
    shape, problems = check_model(job, may_read())
    assert shape is not None, problems
    planned = planned_choices(job, plan_job(job, shape)).optimizer_groups
    anatomy = CAUSAL.build(job.model)
    freeze(anatomy.model, job.model.freeze_module_prefix)
    built = describe_groups(build_optimizers(anatomy, job.training))
    assert [{**one, "optimizer": "AdamW"} for one in planned] == built
    assert [one["name"] for one in built] == [
        "after layers",
        "layer 1",
        "layer 1",
        "before layers",
        "lm_head, after layers",
    ]
    assert (built[-1]["beta1"], built[-1]["beta2"]) == (0.8, 0.9)
    assert sum(int(one["parameters"]) for one in built) == shape.trained


@pytest.mark.parametrize(
    ("training", "frozen", "pointer", "message"),
    [
        (
            {"groups": [{"params": ["model.layer.0"], "lr_scale": 2.0}]},
            (),
            "/training/groups",
            "groups.0.params model.layer.0 matches no parameter; choose for example model.layers.0",
        ),
        (
            {"groups": [{"params": ["*"], "lr_scale": 2.0}, {"params": ["*.weight"], "lr_scale": 3.0}]},
            (),
            "/training/groups",
            "groups.0 has no parameter, because later groups match all of them; move it to the end, or remove it",
        ),
        (
            {"groups": [{"params": ["model.layers.0.mlp"], "lr_scale": 2.0}]},
            ("model.layers.0",),
            "/training/groups",
            "groups.0.params model.layers.0.mlp matches frozen parameters only; remove it",
        ),
    ],
)
def test_groups_without_effect_are_refused_at_submission(
    training: dict[str, Any], frozen: tuple[str, ...], pointer: str, message: str
) -> None:
    _, problems = check_model(job_of(frozen=frozen, **training), may_read())
    assert [(one.pointer, one.message[: len(message)]) for one in problems] == [(pointer, message)]


def test_layer_decay_needs_layers() -> None:
    anatomy = CAUSAL.build(ModelSpec(config=TINY))
    bare = type(anatomy)(**{**vars(anatomy), "layers": ()})
    with pytest.raises(ModelError, match="layer_decay needs layers, and Qwen3ForCausalLM states none; remove it, or"):
        plan_groups(bare, job_of(layer_decay=0.5).training)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            {"groups": [{"params": ["a"]}]},
            "/training/groups/0: the group of a sets nothing; add learning_rate, lr_scale",
        ),
        (
            {"groups": [{"params": ["a"], "learning_rate": 1e-3, "lr_scale": 2.0}]},
            "/training/groups/0: learning_rate and lr_scale each set the learning rate of the group; remove one",
        ),
        (
            {"optimizer": "muon", "groups": [{"params": ["a"], "betas": [0.9, 0.95]}]},
            "/training/groups: betas of the group a have no effect on all of its parameters with optimizer=muon;",
        ),
        ({"groups": [{"params": ["a"], "lr": 1.0}]}, "/training/groups/0/lr: no such field; use learning_rate"),
        ({"llrd": 0.9}, "/training/llrd: no such field; use training.layer_decay"),
        ({"layer_decay": 1.0}, "/training/layer_decay: input should be less than 1"),
        ({"optimizer": "schedule_free_adamw"}, "replaces the schedule lr_scheduler_type=cosine by an average of the"),
        (
            {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant", "ema_decay": 0.9},
            "averages the weights itself, and evaluation and export use that; remove ema_decay=0.9",
        ),
        (
            {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant", "adam_beta1": 0.0},
            "computes its average from the weights with 1 / adam_beta1, and it is 0; choose one above 0, such as 0.9",
        ),
        ({"optimizer": "lion", "adam_epsilon": 1e-6}, "adam_epsilon=1e-06 has no effect with optimizer=lion, whose"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(raw_spec(training=training))
    assert message in str(caught.value)


def test_averages_need_fp32_weights() -> None:
    free = {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    with pytest.raises(SpecError, match=r"moves its average by 1 / steps, which model.master_dtype=bf16 rounds away"):
        parse(raw_spec(model={"dtype": "bf16", "master_dtype": "bf16"}, training=free))


def test_lion_has_the_second_beta_of_its_paper_unless_it_is_set() -> None:
    assert spec(training={"optimizer": "lion"}).training.adam_beta2 == 0.99
    assert spec(training={"optimizer": "lion", "adam_beta2": 0.999}).training.adam_beta2 == 0.999
    assert spec().training.adam_beta2 == 0.999


def test_own_code_may_have_groups() -> None:
    training = {"learning_rate": 1e-3, "max_steps": 4, "groups": [{"params": ["head"], "lr_scale": 2.0}]}
    assert len(parse(code_spec(training=training)).training.groups) == 1


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}},
        {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1e-4}},
        {"lr_scheduler_type": "wsd"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "min_lr": 5e-4}},
    ],
    ids=lambda schedule: schedule["lr_scheduler_type"],
)
def test_schedule_scales_the_rate_of_every_group(schedule: dict[str, Any]) -> None:
    data = {"eval": {"path": "stdlib://*.py"}} if schedule["lr_scheduler_type"] == "reduce_lr_on_plateau" else {}
    more = {"eval_steps": 1} if data else {}
    groups = [{"params": ["lm_head"], "lr_scale": 4.0}]
    job = spec(training={"learning_rate": 1e-3, "max_steps": 10, "groups": groups} | schedule | more, data=data)
    (optimizer,) = build_optimizers(CAUSAL.build(job.model), job.training)
    scheduler = build_scheduler(optimizer, job.training, steps=10)
    rates = list[list[float]]()
    for _ in range(12):
        rates.append([float(rate) for rate in scheduler.get_last_lr()])
        optimizer.step()
        scheduler.step()
        if hasattr(scheduler, "evaluated"):
            scheduler.evaluated(1.0)
    assert len({base for base, *_ in rates}) > 1
    for base, *others, own in rates:
        assert own == pytest.approx(4 * base)
        assert others == [base] * len(others)


def test_named_groups_are_saved_with_their_names() -> None:
    job = job_of(groups=[{"params": ["lm_head"], "lr_scale": 4.0}])
    (optimizer,) = build_optimizers(CAUSAL.build(job.model), job.training)
    assert [group["name"] for group in optimizer.param_groups] == ["others", "others", "lm_head"]
