"""Schedules against torch's own schedulers, step by step, and what durations and warm-up make of them."""

from __future__ import annotations

import pytest
import torch
from running import train
from torch.optim import SGD, AdamW, lr_scheduler

from ptfast.config.checks.target_checks import check_target
from ptfast.config.files import paths
from ptfast.config.read import read_config
from ptfast.core.batch_plan import BatchPlan
from ptfast.core.durations import Duration
from ptfast.core.errors import ConfigError
from ptfast.core.sections.targets import Target, parse_target
from ptfast.techniques.schedule.lr_schedules import (
    Constant,
    Cosine,
    Linear,
    LRSchedule,
    MultiStep,
    OneCycle,
    Polynomial,
    Step,
    Wsd,
)
from ptfast.techniques.schedule.scheduled_run import RunSchedule, build_schedule, build_shape

TOTAL = 97


def plan(steps_per_epoch: int | None) -> BatchPlan:
    return BatchPlan(steps_per_epoch and 32 * steps_per_epoch, 32)


def built(
    shape: LRSchedule, warmup: str = "0", total_steps: int = TOTAL, steps_per_epoch: int | None = 10
) -> RunSchedule:
    return build_schedule(
        shape,
        warmup=Duration.parse(warmup),
        total_steps=total_steps,
        plan=plan(steps_per_epoch),
    )


def optimizer(lr: float = 0.3, **kwargs) -> SGD:
    return SGD([torch.zeros(1, requires_grad=True)], lr=lr, **kwargs)


def torch_lrs(make, lr: float = 0.3, steps: int = TOTAL) -> list[float]:
    """The rates that a torch scheduler sets, as parts of the base rate."""
    opt = optimizer(lr)
    scheduler = make(opt)
    rates = []
    for _ in range(steps):
        rates.append(opt.param_groups[0]["lr"] / lr)
        opt.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        (Constant(), lambda opt: lr_scheduler.ConstantLR(opt, factor=1.0)),
        (Step(Duration(7, "steps"), gamma=0.7), lambda opt: lr_scheduler.StepLR(opt, 7, gamma=0.7)),
        (
            MultiStep([Duration(3, "epochs"), Duration(55, "steps")], gamma=0.2),
            lambda opt: lr_scheduler.MultiStepLR(opt, [30, 55], gamma=0.2),
        ),
        (Linear(), lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.0, TOTAL)),
        (Linear(end=0.25), lambda opt: lr_scheduler.LinearLR(opt, 1.0, 0.25, TOTAL)),
        (Cosine(), lambda opt: lr_scheduler.CosineAnnealingLR(opt, TOTAL)),
        (Cosine(end=0.1), lambda opt: lr_scheduler.CosineAnnealingLR(opt, TOTAL, eta_min=0.03)),
        (
            Wsd(decay=Duration(30, "steps"), anneal="linear", end=0.1),
            lambda opt: lr_scheduler.SequentialLR(
                opt,
                [lr_scheduler.ConstantLR(opt, 1.0), lr_scheduler.LinearLR(opt, 1.0, 0.1, 30)],
                milestones=[TOTAL - 30],
            ),
        ),
        (Polynomial(power=2.5), lambda opt: lr_scheduler.PolynomialLR(opt, TOTAL, power=2.5)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, LRSchedule) else "",
)
def test_equals_torch(shape, make):
    assert built(shape).lr_factors(0, TOTAL) == pytest.approx(torch_lrs(make), rel=1e-12, abs=1e-12)
    assert built(shape).momenta(0, TOTAL) is None


@pytest.mark.parametrize("total", [97, 10, 1000])
@pytest.mark.parametrize("pct", [30, 45, 12.5])
@pytest.mark.parametrize("three_phase", [False, True])
@pytest.mark.parametrize(("anneal", "torch_anneal"), [("linear", "linear"), ("cosine", "cos")])
@pytest.mark.parametrize("optimizer_class", [SGD, AdamW])
def test_one_cycle_equals_torch(total, pct, three_phase, anneal, torch_anneal, optimizer_class):
    opt = optimizer_class([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = lr_scheduler.OneCycleLR(
        opt,
        max_lr=0.3,
        total_steps=total,
        pct_start=pct / 100,
        anneal_strategy=torch_anneal,
        div_factor=25,
        final_div_factor=1e4,
        three_phase=three_phase,
    )
    rates, momenta = [], []
    for step in range(total):
        group = opt.param_groups[0]
        rates.append(group["lr"] / 0.3)
        momenta.append(group["betas"][0] if "betas" in group else group["momentum"])
        opt.step()
        if step < total - 1:
            scheduler.step()
    phase = Duration(pct, "percent")
    fall = phase if three_phase else None
    shape = OneCycle(start=1 / 25, end=1 / 25 / 1e4, rise=phase, fall=fall, anneal=anneal)
    schedule = built(shape, total_steps=total)
    assert schedule.lr_factors(0, total) == pytest.approx(rates, rel=1e-12, abs=1e-12)
    assert schedule.momenta(0, total) == pytest.approx(momenta, rel=1e-12, abs=1e-12)


def test_one_cycle_as_smith_runs_it():
    schedule = built(OneCycle(), total_steps=1000)
    factors, momenta = schedule.lr_factors(0, 1000), schedule.momenta(0, 1000)
    assert momenta is not None
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(1.0)
    assert factors.index(max(factors)) == 449
    assert factors[898] == pytest.approx(0.1)
    assert factors[-1] == pytest.approx(1e-4)
    assert (momenta[0], momenta[449], momenta[-1]) == pytest.approx((0.95, 0.85, 0.95))


def test_momentum_is_off_where_the_optimizer_has_none():
    notes = []
    for shape, has_momentum in (
        (OneCycle(), False),
        (OneCycle(), True),
        (Cosine(), False),
    ):
        schedule = build_schedule(
            shape,
            warmup=Duration(0, "steps"),
            total_steps=TOTAL,
            plan=plan(10),
            has_momentum=has_momentum,
        )
        assert (schedule.momenta(0, 5) is not None) is (schedule.momentum_note == "cycled")
        notes.append(schedule.momentum_note)
    assert notes == ["not cycled: no momentum to cycle", "cycled", None]


def test_one_cycle_without_momentum():
    assert built(OneCycle(momentum_max=None, momentum_min=None)).momenta(0, 5) is None


@pytest.mark.parametrize("option", paths.options("schedule"))
@pytest.mark.parametrize("warmup", ["0", "13steps"])
def test_any_segment_of_any_option_is_the_same_function(option, warmup):
    config = read_config([f"schedule={option}"])[1]
    schedule = built(build_shape(config.schedule.target, 0.1), warmup)
    whole, momenta = schedule.lr_factors(0, TOTAL), schedule.momenta(0, TOTAL)
    assert all(isinstance(factor, float) for factor in whole)
    for first, last in [(0, 1), (5, 20), (12, 14), (13, 50), (96, 97), (40, 40)]:
        assert schedule.lr_factors(first, last) == whole[first:last]
        assert schedule.momenta(first, last) == (momenta and momenta[first:last])


def test_warmup_stable_decay_along_a_root():
    factors = built(Wsd(decay=Duration(4, "steps")), "2steps", total_steps=8).lr_factors(0, 9)
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1 - 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0])


def test_warmup_then_a_shape_that_ends_with_the_run():
    def make(opt):
        # Equal parts of the full rate, reached at the tenth step; the cosine starts at the eleventh.
        ramp = lr_scheduler.LinearLR(opt, 0.1, 1.0, 9)
        cosine = lr_scheduler.CosineAnnealingLR(opt, TOTAL - 10)
        return lr_scheduler.SequentialLR(opt, [ramp, cosine], milestones=[10])

    factors = built(Cosine(), "1epochs").lr_factors(0, TOTAL)
    assert factors == pytest.approx(torch_lrs(make), rel=1e-12, abs=1e-12)
    assert factors[:3] == pytest.approx([0.1, 0.2, 0.3])


def test_milestones_count_from_the_start_of_the_run():
    factors = built(MultiStep([Duration(30, "steps")]), "10steps").lr_factors(0, TOTAL)
    assert factors[8:11] == pytest.approx([0.9, 1.0, 1.0])
    assert factors[29:31] == pytest.approx([1.0, 0.1])


def test_warmup_may_fill_the_run():
    for shape in (Constant(), Cosine(), OneCycle()):
        factors = built(shape, "100%").lr_factors(0, TOTAL)
        assert factors == pytest.approx([(step + 1) / TOTAL * factors[-1] for step in range(TOTAL)])


def test_warmup_longer_than_the_run():
    with pytest.raises(ConfigError, match=r"warmup=10epochs.* 100 steps .* 97") as caught:
        built(Cosine(), "10epochs")
    assert caught.value.code == "C011"


def test_durations_are_read_as_users_write_them():
    assert Step("3") == Step(Duration(3, "epochs"))  # pyright: ignore[reportArgumentType]
    assert built(MultiStep([2, "50%"])).lr_factors(19, 21) == pytest.approx([1.0, 0.1])  # pyright: ignore[reportArgumentType]
    assert built(Step(Duration(64, "samples"))).lr_factors(0, 4) == pytest.approx([1, 1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("code", "make"),
    [
        ("C005", lambda: built(MultiStep([Duration(9, "epochs"), Duration(3, "steps")]))),
        ("C005", lambda: built(Step(Duration(0, "epochs")))),
        ("C011", lambda: built(Wsd(decay=Duration(98, "steps")))),
        ("C011", lambda: OneCycle(momentum_max=None)),
        ("C011", lambda: built(OneCycle(rise=Duration(60, "percent")))),
        ("C011", lambda: built(Step(Duration(1, "epochs")), steps_per_epoch=None)),
    ],
)
def test_refused(code, make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("shape", "warmup", "alike_steps"),
    [
        (Constant(), "0", TOTAL),
        (Constant(), "5steps", TOTAL),
        (Constant(), "5%", 0),
        (Step(Duration(3, "epochs")), "0", TOTAL),
        (Step(Duration(30, "percent")), "0", 29),
        (MultiStep([Duration(3, "epochs")]), "1epochs", TOTAL),
        (MultiStep([Duration(50, "percent")]), "0", 49),
        (Linear(), "0", 1),
        (Cosine(), "0", 1),
        (OneCycle(), "0", 1),
        (Wsd(), "1epochs", TOTAL - 19 + 1),
        (Wsd(decay=Duration(2, "epochs")), "5steps", TOTAL - 20 + 1),
        (Wsd(), "5%", 0),
    ],
)
def test_how_far_a_longer_run_begins_alike(shape, warmup, alike_steps):
    longer = built(shape, warmup, total_steps=2 * TOTAL)
    assert [longer.begins_like(TOTAL, steps) for steps in range(TOTAL + 1)] == [
        steps <= alike_steps for steps in range(TOTAL + 1)
    ]


def test_steps_past_the_end_keep_the_last_figure():
    for shape in (Linear(end=0.1), Cosine(end=0.1), Polynomial(2.0, end=0.1), OneCycle(end=0.1)):
        assert built(shape).lr_factors(TOTAL + 5, TOTAL + 6) == pytest.approx([0.1])


def torchs(name: str, **kwargs) -> Target:
    """A scheduler of torch's as a config names it."""
    target, problems = check_target(parse_target({"_target_": f"{LRS}.{name}", **kwargs}), "schedule")
    assert problems == []
    return target


def decayed(step: int, rate: float = 0.9) -> float:
    return rate**step


def falling(step: int, num_steps: int, end: float = 0.0) -> float:
    return 1 - (1 - end) * step / num_steps


def sinking(step: int) -> float:
    return 1 - step / 50


LRS = "torch.optim.lr_scheduler"
HERE = __name__
STEP_LR = {"_target_": f"{LRS}.StepLR", "step_size": 7}
WARMED = {"_target_": f"{LRS}.LinearLR", "start_factor": 0.1}


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("CosineAnnealingWarmRestarts", {"T_0": 10, "T_mult": 2, "eta_min": 0.01}),
        ("ExponentialLR", {"gamma": 0.97}),
        ("LambdaLR", {"lr_lambda": {"_target_": f"{HERE}.decayed", "_partial_": True}}),
        ("OneCycleLR", {"max_lr": 0.9, "total_steps": TOTAL}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 9}),
        ("SequentialLR", {"schedulers": [WARMED, STEP_LR], "milestones": [5]}),
        ("ChainedScheduler", {"schedulers": [WARMED, STEP_LR]}),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_scheduler_of_torchs_by_name_is_that_scheduler(name, kwargs):
    opt = optimizer(0.3, momentum=0.5)
    each = [getattr(lr_scheduler, k["_target_"].split(".")[-1]) for k in kwargs.get("schedulers", ())]
    given = {**kwargs}
    if each:
        own = ({k: v for k, v in inner.items() if k != "_target_"} for inner in kwargs["schedulers"])
        given["schedulers"] = [make(opt, **inner) for make, inner in zip(each, own, strict=True)]
    if name == "LambdaLR":
        given["lr_lambda"] = decayed
    scheduler = getattr(lr_scheduler, name)(optimizer=opt, **given)
    rates, momenta = [], []
    for step in range(TOTAL):
        opt.step()
        scheduler.step() if step else None
        rates.append(opt.param_groups[0]["lr"])
        momenta.append(opt.param_groups[0]["momentum"])
    schedule = built(build_shape(torchs(name, **kwargs), 0.3))
    assert [0.3 * factor for factor in schedule.lr_factors(0, TOTAL)] == pytest.approx(rates, rel=1e-12)
    assert schedule.momenta(0, TOTAL) == (pytest.approx(momenta) if len({*momenta}) > 1 else None)


def test_a_function_of_the_step_counts_warm_up_and_one_of_the_run_follows_it():
    def shape(name: str, **kwargs) -> LRSchedule:
        target, problems = check_target(Target(f"{HERE}.{name}", kwargs), "schedule")
        assert problems == []
        return build_shape(target, 0.3)

    factors = built(shape("decayed", rate=0.5), "2steps", total_steps=4).lr_factors(0, 4)
    assert factors == [0.5, 0.5, 0.25, 0.125]
    factors = built(shape("falling", end=0.5), "2steps", total_steps=6).lr_factors(0, 6)
    assert factors == [0.5, 1.0, 1.0, 0.875, 0.75, 0.625]
    _, (problem,) = check_target(Target(f"{HERE}.falling", {"num_steps": 3}), "schedule")
    assert problem.code == "C002"


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (Target(f"{HERE}.sinking"), "at step 51 it gives -0.02"),
        (Target(f"{HERE}.decayed", {"rate": "x"}), "at step 0 it raises TypeError"),
        (Target(f"{LRS}.OneCycleLR", {"max_lr": 0.1}), "raises ValueError: You must define"),
        (Target(f"{LRS}.OneCycleLR", {"max_lr": 0.1, "total_steps": 9}), "at step 10 it raises ValueError"),
    ],
)
def test_a_schedule_that_fails_is_named_before_training(target, what):
    with pytest.raises(ConfigError, match=rf"^schedule._target_={target.path}: {what}") as caught:
        built(build_shape(target, 0.3))
    assert caught.value.code == "C017"


@pytest.mark.parametrize(
    ("name", "kwargs", "step"),
    [
        ("StepLR", {"step_size": 10}, 20),
        ("MultiStepLR", {"milestones": [30, 60]}, 60),
        ("ExponentialLR", {"gamma": 0.9}, 44),
        ("CosineAnnealingLR", {"T_max": 10}, 10),
        ("PolynomialLR", {"total_iters": 5}, 5),
        ("CosineAnnealingWarmRestarts", {"T_0": 20}, 19),
        ("StepLR", {"step_size": 400}, None),
        ("StepLR", {"step_size": 10, "gamma": 1.0}, None),
        ("MultiStepLR", {"milestones": [300, 600]}, None),
        ("ExponentialLR", {"gamma": 0.99}, None),
        ("CosineAnnealingLR", {"T_max": 1000}, None),
        ("OneCycleLR", {"max_lr": 0.9, "total_steps": 1000}, None),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.3, "step_size_up": 9}, None),
        ("LinearLR", {"start_factor": 0.1}, None),
        ("ConstantLR", {}, None),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_rate_at_its_lowest_in_the_first_tenth_is_found(name, kwargs, step):
    """As of a scheduler whose lengths are meant in epochs, which an optimizer steps through at once."""
    shape = build_shape(Target(f"{LRS}.{name}", kwargs), 0.3)
    assert shape.lowest_from(1000) == step


def test_a_scheduler_meant_for_epochs_is_warned_of(in_tmp, capsys):
    words = ("data=custom", "data._target_=toys.blobs", "batch_size=5", "data.val=0", "model=mlp")
    words = (*words, "epochs=10", "model.hidden=[4]", f"schedule._target_={LRS}.StepLR")
    assert train(*words, "schedule.step_size=3", "schedule.gamma=0.01") == 0
    printed = capsys.readouterr().out
    assert "warning: schedule: StepLR counts steps, and is at its lowest from step 4 of 100" in printed
    assert "If a length was meant in epochs, multiply it by the 10 steps of an epoch" in printed
    assert train(*words, "schedule.step_size=30", "run.dir=b") == 0
    assert "warning: schedule" not in capsys.readouterr().out
