"""Resuming under another configuration: each difference is named, accepted only by name, and then holds at once.

A row of the tables has an option, its old and its new value. A run with the old value is resumed after two optimizer
steps with the new one, and what is observed is its first resumed step.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.conversations import Echo, Rewriting
from kit.first_step import FirstStep, SavesAt
from kit.support import a_trainer, differing, fit, parity_reward, tiny_module, tiny_policy, tiny_prompts
from kit.vision import PROCESSORS, picture, vision_model
from lightning.pytorch import Callback
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2ForCausalLM, get_linear_schedule_with_warmup
from typing_extensions import override

from lightning_rl import (
    ClippedSurrogate,
    Conversations,
    Critic,
    LossTerm,
    PromptDataModule,
    RayWorkers,
    Rewards,
    RLCallback,
    ValueLoss,
)
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import OPSM, AdaptiveKL, EntropyBonus, NoEOSMask
from lightning_rl.checkpointing.optimizer_options import rates
from lightning_rl.configuration import check_resume, warn_of_versions
from lightning_rl.generation import request_seed
from lightning_rl.optimizers import fused_adamw, warmup_then_linear
from lightning_rl.rewards import Sandbox, SubprocessReward
from lightning_rl.serialization import describe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pre-optimization state.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
    pytest.mark.filterwarnings("ignore:with one optimizer step per rollout:UserWarning"),
    pytest.mark.filterwarnings("ignore:max_staleness=1 trains on samples of earlier weights:UserWarning"),
]

Options = dict[str, Any]


def longer(prompts: Any, completions: Any, *, completion_ids: Any, **columns: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def two_rates(policy: float, critic: float, groups: list[dict[str, Any]]) -> Optimizer:
    """AdamW with a rate for each model."""
    lr = {"policy": policy, "critic": critic}
    return AdamW([{**group, "lr": lr[group["name"]]} for group in groups])


def tensor_rate(lr: float, groups: list[dict[str, Any]]) -> Optimizer:
    """AdamW with a rate to which a schedule writes in place."""
    return AdamW(groups, lr=torch.tensor(lr))


def parts(number: int, groups: list[dict[str, Any]]) -> Optimizer:
    """AdamW with the parameters of the policy in a number of groups."""
    weights = groups[0]["params"]
    return AdamW([{"params": weights[place::number]} for place in range(number)], lr=1e-2)


def ordered(order: Callable[[list[Any]], list[Any]], groups: list[dict[str, Any]]) -> Optimizer:
    """AdamW with some parameters of the policy, in an order."""
    return AdamW(order(groups[0]["params"]), lr=1e-2)


def of_one_shape(weights: list[Any], first: int = 0) -> list[Any]:
    """Every second weight of the most frequent shape."""
    shapes = [weight.shape for weight in weights]
    same = [weight for weight in weights if weight.shape == max(shapes, key=shapes.count)]
    return same[first::2][: len(same) // 2]


def rotated(weights: list[Any]) -> list[Any]:
    """The weights of one shape in another order, then all others."""
    same = of_one_shape(weights) + of_one_shape(weights, 1)
    others = [weight for weight in weights if all(weight is not one for one in same)]
    return [*same[1:], same[0], *others]


def unrotated(weights: list[Any]) -> list[Any]:
    kept = rotated(weights)
    number = len(of_one_shape(weights) + of_one_shape(weights, 1))
    return [kept[number - 1], *kept[: number - 1], *kept[number:]]


def pairs_of_groups(first: int, groups: list[dict[str, Any]]) -> Optimizer:
    """AdamW with two groups of equal shapes."""
    weights = groups[0]["params"]
    return AdamW([{"params": of_one_shape(weights, place)} for place in (first, 1 - first)], lr=1e-2)


def cosine_after(warmup: int, optimizer: Optimizer) -> SequentialLR:
    """Linear warmup, then a cosine."""
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, warmup), CosineAnnealingLR(optimizer, 20)], [warmup])


def chained(gamma: float, optimizer: Optimizer) -> ChainedScheduler:
    """A constant factor, and an exponential one."""
    return ChainedScheduler([ConstantLR(optimizer, 0.5, 10), ExponentialLR(optimizer, gamma)], optimizer)


def inverse(power: float, step: int) -> float:
    return (step + 1) ** -power


def start(path: Path, step: int = 2, *, end: int | None = None, callbacks: Any = (), **options: Any) -> SavesAt:
    """Runs with the old options up to a checkpoint, or to a later end."""
    saves, data = SavesAt(step, path), options.pop("data", None)
    fit(tiny_module(**options), callbacks=[*callbacks, saves], data=data, max_steps=end or step)
    return saves


def resume(path: Path, *, step: int = 3, callbacks: Any = (), data: Any = None, **options: Any) -> FirstStep:
    """Resumes with the new options for one optimizer step."""
    first, trainer = FirstStep(), options.pop("trainer", {})
    fit(tiny_module(**options), callbacks=[*callbacks, first], data=data, ckpt_path=path, max_steps=step, **trainer)
    assert first.after, "no step was made"
    return first


def changed(folder: Path, name: str, old: Options, new: Options, **both: Any) -> tuple[FirstStep, SavesAt]:
    """The first step of a run that is resumed with an accepted change, and what was saved."""
    path = folder / "a.ckpt"
    saves = start(path, **both, **old)
    with pytest.raises(ValueError, match=rf"allow_config_changes=\['{name}'\]"):
        resume(path, **both, **new)
    return resume(path, allow_config_changes=[name], **both, **new), saves


def rows_of_table(table: Iterable[str], *daily: str) -> list[Any]:
    """The names of a table's rows; those that are not tested for each commit are nightly."""
    return [row if row in daily else pytest.param(row, marks=pytest.mark.nightly) for row in table]


CRITIC: Options = {"critic": "shared", "advantages": "gae", "group_size": 1}
ADAMW = partial(AdamW, lr=1e-2)
WARMUP = warmup_then_linear(1, 9)


# Optimizer and schedule: the resumed step is, bit for bit, that of what is configured now.

OPTIMIZERS: dict[str, tuple[Any, Any, bool]] = {  # old, new, if its moments are kept
    "lr": (ADAMW, partial(AdamW, lr=1e-3), True),
    "lr that is a tensor": (partial(tensor_rate, 1e-2), partial(tensor_rate, 1e-3), True),
    "lr of SGD": (partial(SGD, lr=0.1), partial(SGD, lr=0.01), True),
    "weight_decay": (ADAMW, partial(AdamW, lr=1e-2, weight_decay=0.5), True),
    "betas": (ADAMW, partial(AdamW, lr=1e-2, betas=(0.5, 0.6)), True),
    "eps": (ADAMW, partial(AdamW, lr=1e-2, eps=1e-2), True),
    "fused": (ADAMW, partial(fused_adamw, lr=1e-3), True),
    "not fused": (partial(fused_adamw, lr=1e-3), ADAMW, True),
    "momentum": (partial(SGD, lr=0.1, momentum=0.5), partial(SGD, lr=0.1, momentum=0.9), True),
    "rate of a group": (partial(two_rates, 1e-2, 1e-2), partial(two_rates, 1e-2, 1e-3), True),
    "with momentum": (partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.9), False),
    "amsgrad": (ADAMW, partial(AdamW, lr=1e-2, amsgrad=True), False),
    "centered": (partial(RMSprop, lr=1e-2), partial(RMSprop, lr=1e-2, centered=True), False),
    "SGD to AdamW": (partial(SGD, lr=0.1), ADAMW, False),
    "AdamW to SGD": (ADAMW, partial(SGD, lr=0.1, momentum=0.9), False),
    "two groups of one": (partial(parts, 1), partial(parts, 2), False),
    "order within a shape": (partial(ordered, unrotated), partial(ordered, rotated), False),
    "backwards": (partial(ordered, list), partial(ordered, lambda weights: weights[::-1]), False),
    "others of one shape": (partial(ordered, of_one_shape), partial(ordered, partial(of_one_shape, first=1)), False),
    "groups change places": (partial(pairs_of_groups, 0), partial(pairs_of_groups, 1), False),
}


DAILY = (
    *("lr", "lr that is a tensor", "SGD to AdamW", "AdamW to SGD", "rate of a group"),
    *("order within a shape", "others of one shape"),
)


@pytest.mark.filterwarnings("ignore:.*trainable parameters are in no group of the optimizer")
@pytest.mark.parametrize("schedule", [None, WARMUP], ids=["constant", "scheduled"])
@pytest.mark.parametrize("row", rows_of_table(OPTIMIZERS, *DAILY))
def test_the_new_optimizer_makes_the_first_resumed_step(row: str, schedule: Any, tmp_path: Path) -> None:
    old, new, keeps = OPTIMIZERS[row]
    both = {"lr_scheduler": schedule, **(CRITIC if "group" in row and "groups" not in row else {})}
    first, saves = changed(tmp_path, "optimizer", {"optimizer": old}, {"optimizer": new}, **both)
    first.check_optimizer(new, schedule, steps=2, moments=saves.moments if keeps else ())
    assert first.logged["optim/lr"] == first.options[0]["lr"]


SCHEDULES: dict[str, tuple[Any, Any]] = {
    "length": (WARMUP, warmup_then_linear(1, 90)),
    "warmup": (WARMUP, warmup_then_linear(4, 9)),
    "added": (None, WARMUP),
    "removed": (WARMUP, None),
    "another kind": (WARMUP, partial(CosineAnnealingLR, T_max=5)),
    "T_max": (partial(CosineAnnealingLR, T_max=5), partial(CosineAnnealingLR, T_max=50)),
    "gamma": (partial(StepLR, step_size=1, gamma=0.5), partial(StepLR, step_size=1, gamma=0.9)),
    "lambda": (partial(LambdaLR, lr_lambda=partial(inverse, 0.5)), partial(LambdaLR, lr_lambda=partial(inverse, 1.0))),
    "total_steps": (
        partial(OneCycleLR, max_lr=1e-2, total_steps=9),
        partial(OneCycleLR, max_lr=1e-2, total_steps=90),
    ),
    "max_lr": (partial(OneCycleLR, max_lr=1e-2, total_steps=9), partial(OneCycleLR, max_lr=1e-1, total_steps=9)),
    "one cycle added": (None, partial(OneCycleLR, max_lr=1e-1, total_steps=9)),
    "one cycle removed": (partial(OneCycleLR, max_lr=1e-1, total_steps=9), None),
    "milestone": (partial(cosine_after, 1), partial(cosine_after, 4)),
    "to a sequence": (WARMUP, partial(cosine_after, 1)),
    "of a sequence": (partial(cosine_after, 4), WARMUP),
    "chain": (partial(chained, 0.9), partial(chained, 0.5)),
}


@pytest.mark.parametrize("row", rows_of_table(SCHEDULES, "length", "added", "removed", "T_max", "one cycle removed"))
def test_the_new_schedule_goes_on_at_the_step_of_the_run(row: str, tmp_path: Path) -> None:
    old, new = SCHEDULES[row]
    first, saves = changed(tmp_path, "lr_scheduler", {"lr_scheduler": old}, {"lr_scheduler": new}, optimizer=ADAMW)
    first.check_optimizer(ADAMW, new, steps=2, moments=saves.moments)


DECAY = {"gamma": 0.9}


class Opaque:
    """Keeps a builder in a private attribute."""

    def __init__(self, build: Callable[[Optimizer], Any]) -> None:
        self._build = build

    def __call__(self, optimizer: Optimizer) -> Any:
        """Calls it."""
        return self._build(optimizer)


def of_global(optimizer: Optimizer) -> ExponentialLR:
    return ExponentialLR(optimizer, DECAY["gamma"])


BODIES: dict[str, tuple[Callable[[Optimizer], Any], Callable[[Optimizer], Any]]] = {  # described alike
    "gamma": (lambda o: StepLR(o, 1, 0.9), lambda o: StepLR(o, 1, 0.5)),
    "another class": (lambda o: ExponentialLR(o, 0.9), lambda o: CosineAnnealingLR(o, 7)),
    "lambda": (
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    ),
    "list of lambdas": (
        lambda o: LambdaLR(o, [lambda step: 0.9**step]),
        lambda o: LambdaLR(o, [lambda step: 0.7**step]),
    ),
    "factors": (
        lambda o: MultiplicativeLR(o, lambda _: 0.9),
        lambda o: MultiplicativeLR(o, lambda _: 0.5),
    ),
    "late milestone": (lambda o: MultiStepLR(o, [500]), lambda o: MultiStepLR(o, [600])),
    "sequence": (lambda o: cosine_after(1, o), lambda o: cosine_after(4, o)),
    "chain": (lambda o: chained(0.9, o), lambda o: chained(0.5, o)),
    "momentum": (
        lambda o: OneCycleLR(o, 1e-2, 9, base_momentum=0.85),
        lambda o: OneCycleLR(o, 1e-2, 9, base_momentum=0.5),
    ),
    "end": (lambda o: OneCycleLR(o, 1e-2, 9, three_phase=True), lambda o: OneCycleLR(o, 1e-2, 90)),
}


@pytest.mark.parametrize("row", BODIES)
def test_the_body_of_a_schedule_is_compared_and_holds_at_once(row: str, tmp_path: Path) -> None:
    old, new = (Opaque(build) for build in BODIES[row])
    assert describe(old) == describe(new)
    first, saves = changed(tmp_path, "lr_scheduler", {"lr_scheduler": old}, {"lr_scheduler": new}, optimizer=ADAMW)
    first.check_optimizer(ADAMW, new, steps=2, moments=saves.moments)


def test_a_global_that_a_schedule_reads_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = start(tmp_path / "a.ckpt", optimizer=ADAMW, lr_scheduler=of_global)
    monkeypatch.setitem(DECAY, "gamma", 0.5)
    options: Options = {"optimizer": ADAMW, "lr_scheduler": of_global}
    with pytest.raises(ValueError, match=r"lr_scheduler.lr at step 1: \[0.9\] in the checkpoint, \[0.5\] now"):
        resume(tmp_path / "a.ckpt", **options)
    first = resume(tmp_path / "a.ckpt", allow_config_changes=["lr_scheduler"], **options)
    first.check_optimizer(ADAMW, of_global, steps=2, moments=saves.moments)


@pytest.mark.parametrize("row", ["lambda", "momentum", "sequence", "chain", "factors"])
def test_a_schedule_of_another_base_rate_is_the_same(row: str, tmp_path: Path) -> None:
    """Only the optimizer is named, and the schedule of the run is as without the comparison."""
    build = Opaque(BODIES[row][0])
    saves = start(tmp_path / "a.ckpt", optimizer=ADAMW, lr_scheduler=build)
    now = partial(AdamW, lr=1e-3, weight_decay=0.1)
    first = resume(tmp_path / "a.ckpt", optimizer=now, lr_scheduler=build, allow_config_changes=["optimizer"])
    first.check_optimizer(now, build, steps=2, moments=saves.moments)


def test_a_comparison_leaves_the_optimizer_as_it_was() -> None:
    optimizer = SGD(
        [{"params": [torch.zeros(1)], "lr": torch.tensor(0.1)}, {"params": [torch.ones(1)]}], lr=0.2, momentum=0.5
    )
    before = str([optimizer.param_groups, sorted(vars(optimizer)), "step" in vars(optimizer)])
    found = rates(partial(OneCycleLR, max_lr=0.3, total_steps=4), optimizer)
    assert [len(values) for values in found["lr"]] == [2] * 5 and found.keys() == {"lr", "momentum"}
    assert str([optimizer.param_groups, sorted(vars(optimizer)), "step" in vars(optimizer)]) == before


ENDED: dict[str, Callable[[Optimizer], Any]] = {
    "warmup": warmup_then_linear(1, 2),
    "linear": partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=2),
    "polynomial": partial(PolynomialLR, total_iters=1),
    "lambda": Opaque(lambda o: LambdaLR(o, lambda step: max(0.0, 1 - step / 2))),
    "transformers": partial(get_linear_schedule_with_warmup, num_warmup_steps=0, num_training_steps=2),
}


@pytest.mark.parametrize("row", ENDED)
@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_a_schedule_whose_rate_is_0_from_the_checkpoint_on_is_refused(row: str, tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", lr_scheduler=WARMUP)
    with pytest.raises(
        ValueError, match="expected an lr_scheduler that reaches optimizer step 2, got one whose learning rate is 0"
    ):
        resume(tmp_path / "a.ckpt", lr_scheduler=ENDED[row], allow_config_changes=["lr_scheduler"])


@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_a_schedule_that_passes_0_at_the_checkpoint_goes_on(tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", lr_scheduler=WARMUP, optimizer=ADAMW)
    waves = partial(CosineAnnealingLR, T_max=2)
    first = resume(tmp_path / "a.ckpt", lr_scheduler=waves, optimizer=ADAMW, allow_config_changes=["lr_scheduler"])
    assert first.options[0]["lr"] == 0.0


def test_the_resumed_run_goes_on_under_the_new_schedule(tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", lr_scheduler=WARMUP)
    module = tiny_module(lr_scheduler=warmup_then_linear(1, 90), allow_config_changes=["lr_scheduler"])
    trainer = fit(module, ckpt_path=tmp_path / "a.ckpt", max_steps=4)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 86 / 89, rel=1e-12)


@pytest.mark.filterwarnings("ignore:the schedule of lr_scheduler= ends")
def test_a_schedule_that_ends_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt")
    short = {"lr_scheduler": partial(OneCycleLR, max_lr=1e-2, total_steps=1), "allow_config_changes": ["lr_scheduler"]}
    with pytest.raises(
        ValueError, match=r"expected an lr_scheduler that reaches optimizer step 2, got Tried to step 2 times"
    ):
        resume(tmp_path / "a.ckpt", **short)


def test_a_policy_from_a_configuration_trains_and_resumes(tmp_path: Path) -> None:
    options: Options = {"policy": partial(Qwen2ForCausalLM, tiny_policy().config)}  # every fit builds from one object
    start(tmp_path / "a.ckpt", **options)
    resume(tmp_path / "a.ckpt", **options)


def test_a_state_that_the_optimizer_keeps_in_its_groups_survives(tmp_path: Path) -> None:
    class Counts(SGD):
        @override
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            super().step(closure)

    start(tmp_path / "a.ckpt", optimizer=partial(Counts, lr=0.1))
    allowed = {"allow_config_changes": ["optimizer"]}
    assert (
        resume(tmp_path / "a.ckpt", optimizer=partial(Counts, lr=0.2), **allowed).options[0]["k"] == 2
    )  # before the third step


RATE = {"lr": 0.1}


def hidden(groups: Any) -> Optimizer:
    """An optimizer whose rate is no argument."""
    return SGD(groups, lr=RATE["lr"])


def test_a_rate_within_the_function_that_builds_the_optimizer_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path / "a.ckpt", optimizer=hidden)
    monkeypatch.setitem(RATE, "lr", 0.01)
    with pytest.raises(
        ValueError, match=r"optimizer.groups.0.lr: 0.1 in the checkpoint, 0.01 now(?s:.*)\['optimizer'\]"
    ):
        resume(tmp_path / "a.ckpt", optimizer=hidden)
    first = resume(tmp_path / "a.ckpt", optimizer=hidden, allow_config_changes=["optimizer"])
    first.check_optimizer(hidden, steps=2)


def test_an_allowed_change_that_was_not_made_resumes_bit_for_bit(tmp_path: Path) -> None:
    """Under a schedule whose rate depends on the run, which nothing but its saved state knows."""
    options: Options = {"lr_scheduler": partial(OneCycleLR, max_lr=1e-2, total_steps=9), "optimizer": ADAMW}
    start(tmp_path / "a.ckpt", **options)
    whole, resumed = tiny_module(**options), tiny_module(**options, allow_config_changes=["optimizer", "lr_scheduler"])
    fit(whole, max_steps=4)
    fit(resumed, ckpt_path=tmp_path / "a.ckpt", max_steps=4)
    assert differing(resumed, whole) == []


def test_another_weight_decay_leaves_the_state_of_the_schedule(tmp_path: Path) -> None:
    class Halves(LambdaLR):
        """Halves the rate at every step of an optimizer with moments, so that its steps cannot be repeated."""

        @override
        def get_lr(self) -> Any:
            return [group["lr"] * (0.5 if self.optimizer.state else 1.0) for group in self.optimizer.param_groups]

    build = partial(Halves, lr_lambda=partial(inverse, 0.0))
    start(tmp_path / "a.ckpt", lr_scheduler=build)
    now = partial(AdamW, lr=1e-2, weight_decay=0.5)
    first = resume(tmp_path / "a.ckpt", lr_scheduler=build, optimizer=now, allow_config_changes=["optimizer"])
    assert (first.options[0]["lr"], first.options[0]["weight_decay"]) == (2.5e-3, 0.5)


def test_a_checkpoint_without_the_options_of_its_optimizer_is_resumed_unchanged_only(tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", optimizer=ADAMW)
    earlier = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del earlier["lightning_rl"]["optimizer"]
    torch.save(earlier, tmp_path / "earlier.ckpt")
    resume(tmp_path / "earlier.ckpt", optimizer=ADAMW)
    with pytest.raises(
        ValueError, match="expected a checkpoint that states the options of its optimizer, got one of an"
    ):
        resume(tmp_path / "earlier.ckpt", optimizer=partial(AdamW, lr=1.0), allow_config_changes=["optimizer"])


# Corrections: a changed option holds, a coefficient that adapted goes on.


class Fades(RLCallback):
    """A correction of a user, whose coefficient is an option and a state."""

    name = "fades"

    def __init__(self, coef: float, factor: float = 0.5) -> None:
        self.coef, self.factor = coef, factor

    @override
    def loss_term(self, view: Any) -> LossTerm:
        return LossTerm(per_token=view.logprobs, coef=self.coef)

    @override
    def after_step(self, outputs: Any) -> None:
        self.coef *= self.factor

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coef = state_dict["coef"]


class Grows(Fades):
    """Another class under the same name, with another state."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"growth": self.coef}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.coef = state_dict["growth"]


def adaptive(beta: float = 0.05, target: float = 0.1, horizon: int = 8) -> AdaptiveKL:
    return AdaptiveKL(beta, as_loss=True, target=target, horizon=horizon)


ADAPTED = "what it was in the checkpoint"
CORRECTIONS: dict[str, tuple[Callable[[], RLCallback], Callable[[], RLCallback], str, Any]] = {
    "fixed entropy": (lambda: EntropyBonus(0.01), lambda: EntropyBonus(0.5), "entropy_bonus/coef", 0.5),
    "adaptive entropy": (
        lambda: EntropyBonus(0.01, target=9.0),
        lambda: EntropyBonus(0.5, target=9.0),
        "entropy_bonus/coef",
        0.5,
    ),
    "step of the entropy": (
        lambda: EntropyBonus(0.01, target=9.0),
        lambda: EntropyBonus(0.01, target=9.0, step=0.1),
        "entropy_bonus/coef",
        0.01 + 0.005 + 0.005,
    ),
    "adaptive entropy to fixed": (
        lambda: EntropyBonus(0.01, target=9.0),
        lambda: EntropyBonus(0.01),
        "entropy_bonus/coef",
        0.01,
    ),
    "resting entropy to fixed": (
        lambda: EntropyBonus(0.01, target=0.1),
        lambda: EntropyBonus(0.01),
        "entropy_bonus/coef",
        0.01,
    ),
    "resting entropy below another target": (
        lambda: EntropyBonus(0.5, target=0.1),
        lambda: EntropyBonus(0.5, target=9.0),
        "entropy_bonus/coef",
        0.5 - 0.005 - 0.005,
    ),
    "entropy above another target": (
        lambda: EntropyBonus(0.5, target=9.0),
        lambda: EntropyBonus(0.5, target=0.1),
        "entropy_bonus/coef",
        0.0,
    ),
    "fixed entropy to adaptive": (
        lambda: EntropyBonus(0.01),
        lambda: EntropyBonus(0.02, target=9.0),
        "entropy_bonus/coef",
        0.02,
    ),
    "beta": (adaptive, lambda: adaptive(0.5), "beta", 0.5),
    "beta of a horizon": (adaptive, lambda: adaptive(horizon=16), "beta", ADAPTED),
    "target of beta": (adaptive, lambda: adaptive(target=0.5), "beta", ADAPTED),
    "coefficient of a user": (lambda: Fades(1.0), lambda: Fades(3.0), "coef", 3.0),
    "factor of a user": (lambda: Fades(1.0), lambda: Fades(1.0, 0.1), "coef", 0.25),
    "another class": (lambda: Fades(1.0), lambda: Grows(1.0), "growth", 1.0),
    "added": (OPSM, lambda: Fades(1.0), "coef", 1.0),
}


@pytest.mark.parametrize(
    "row",
    rows_of_table(
        CORRECTIONS, "fixed entropy", "resting entropy to fixed", "beta", "target of beta", "coefficient of a user"
    ),
)
def test_a_changed_option_of_a_correction_holds_in_the_first_resumed_step(row: str, tmp_path: Path) -> None:
    old, new, figure, expected = CORRECTIONS[row]
    path, correction = tmp_path / "a.ckpt", old()
    start(path, callbacks=[correction])
    with pytest.raises(ValueError, match=r"allow_config_changes=\['corrections'\]"):
        resume(path, callbacks=[new()])
    first = resume(path, callbacks=[new()], allow_config_changes=["corrections"])
    if "/" in figure:
        assert first.logged[figure] == pytest.approx(expected, rel=1e-6)
    else:
        (state,) = first.states.values()
        adapted = torch.load(path, weights_only=True)["callbacks"].get(correction.name, {}).get(figure)
        assert state[figure] == (adapted if expected is ADAPTED else expected)


@pytest.mark.parametrize("build", [adaptive, lambda: EntropyBonus(0.01, target=9.0), lambda: Fades(1.0)])
def test_a_coefficient_that_moved_comes_from_the_checkpoint(build: Callable[[], RLCallback], tmp_path: Path) -> None:
    used = build()
    before = used.state_dict()
    start(tmp_path / "a.ckpt", callbacks=[used])
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["callbacks"][used.name]
    assert saved != before
    for callback in (build(), used):  # in a new process, and in the same
        assert resume(tmp_path / "a.ckpt", callbacks=[callback]).states == {used.name: saved}
    start(tmp_path / "b.ckpt", callbacks=[used])  # a second run begins where the first one ended
    saved = torch.load(tmp_path / "b.ckpt", weights_only=True)["callbacks"][used.name]
    assert resume(tmp_path / "b.ckpt", callbacks=[build()]).states == {used.name: saved}


# Options that make rollouts: the first resumed step is on a rollout that was made with them.


def check_temperature(first: FirstStep) -> None:
    assert {request.sampling.temperature for request in first.requests} == {0.5}


def check_group_size(first: FirstStep) -> None:
    assert first.rollout is not None and first.rollout.groups.unique(return_counts=True)[1].unique().tolist() == [2]


def check_seed(first: FirstStep) -> None:
    assert all(one.seed == request_seed(1, one.rollout, one.sample_id) for one in first.requests)


def check_rewards(first: FirstStep) -> None:
    assert first.rollout is not None and torch.equal(first.rollout.rewards, first.rollout.response_lengths.double())


def check_advantages(first: FirstStep) -> None:
    assert first.rollout is not None and first.rollout.advantages is not None
    rewards, found = first.rollout.rewards.view(-1, 4), first.rollout.advantages[:, 0].view(-1, 4)
    expected = rewards - (rewards.sum(-1, keepdim=True) - rewards) / 3  # RLOO
    assert torch.allclose(found.double(), expected)


def check_norm(first: FirstStep) -> None:
    assert first.norm == pytest.approx(1e-3, rel=1e-4)


def check_precision(first: FirstStep) -> None:
    assert first.autocast == torch.bfloat16


def check_prompts(data: PromptDataModule, first: FirstStep) -> None:
    asked = {tuple(request.prefix_ids) for request in first.requests}
    data.connect(None, None)
    assert asked == {prompt.token_ids for prompt in data.at(range(8, 12))}


def other_rows() -> PromptDataModule:
    return PromptDataModule([[9, 9, 2 + place % 13] for place in range(16)], 4)


ROLLOUTS: dict[str, tuple[str, Callable[[], Options], Callable[[FirstStep], None]]] = {
    "seed": ("seed", lambda: {"seed": 1}, check_seed),
    "group_size": ("group_size", lambda: {"group_size": 2}, check_group_size),
    "temperature": ("sampling", lambda: {"temperature": 0.5}, check_temperature),
    "rewards": ("rewards", lambda: {"rewards": longer}, check_rewards),
    "advantages": ("advantages", lambda: {"advantages": "rloo"}, check_advantages),
    "rows": ("data", lambda: {"data": other_rows()}, partial(check_prompts, other_rows())),
    "order": ("data", lambda: {"data": tiny_prompts(seed=3)}, partial(check_prompts, tiny_prompts(seed=3))),
    "precision": ("precision", lambda: {"trainer": {"precision": "bf16-mixed"}}, check_precision),
    "max_grad_norm": ("max_grad_norm", lambda: {"max_grad_norm": 1e-3}, check_norm),
}


@pytest.mark.parametrize("row", rows_of_table(ROLLOUTS, "seed", "temperature", "rows"))
def test_a_changed_option_of_rollouts_holds_in_the_first_resumed_step(row: str, tmp_path: Path) -> None:
    name, new, check = ROLLOUTS[row]
    start(tmp_path / "a.ckpt")
    check(resume(tmp_path / "a.ckpt", allow_config_changes=[name], **new()))


HALF: Options = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2}  # of a rollout


@pytest.mark.parametrize("row", rows_of_table(["temperature", "rewards", "group_size"], "temperature"))
def test_the_rest_of_a_rollout_that_was_made_with_other_options_is_skipped(row: str, tmp_path: Path) -> None:
    """Its old log-probabilities, rewards and groups are those of the old options."""
    name, new, check = ROLLOUTS[row]
    start(tmp_path / "a.ckpt", **HALF)
    saves = SavesAt(2, tmp_path / "b.ckpt")  # after the first of two skipped steps
    first = resume(tmp_path / "a.ckpt", callbacks=[saves], **HALF, **new(), allow_config_changes=[name])
    check(first)
    again = resume(tmp_path / "b.ckpt", **HALF, **new())
    for one in (first, again):
        assert one.logged["rollout"] == 1 and one.logged["optim/skipped"] == 2
    assert all(torch.equal(one, other) for one, other in zip(first.after, again.after, strict=True))
    assert first.logged["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_a_rollout_in_progress_goes_on_under_another_optimizer(tmp_path: Path) -> None:
    saves = start(tmp_path / "a.ckpt", **HALF, optimizer=ADAMW)
    now = partial(AdamW, lr=1e-3)
    first = resume(tmp_path / "a.ckpt", **HALF, optimizer=now, allow_config_changes=["optimizer"])
    first.check_optimizer(now, steps=2, moments=saves.moments)
    assert first.logged["rollout"] == 0 and first.logged["optim/skipped"] == 0


def echoes(prompts: Any, completions: Any, *, token: Any, **columns: Any) -> list[float]:
    """The column of the prompt's row."""
    return [float(one) for one in token]


def rows_of(*tokens: int) -> PromptDataModule:
    """Rows whose column is the last token of their prompt."""
    return PromptDataModule([{"prompt": [3, token], "token": token} for token in tokens * 8], 4, shuffle=False)


@pytest.mark.parametrize("row", ["data", "sampling"])
def test_rollouts_ahead_are_generated_again_with_the_new_options(row: str, tmp_path: Path) -> None:
    options: Options = {"max_staleness": 1, "rewards": echoes}
    start(tmp_path / "a.ckpt", end=4, data=rows_of(4, 5), **options)
    new: Options = {"data": rows_of(8, 9)} if row == "data" else {"data": rows_of(4, 5), "temperature": 0.5}
    first = resume(tmp_path / "a.ckpt", **new, **options, allow_config_changes=[row])
    rollout = first.rollout
    assert rollout is not None and torch.equal(rollout.prompt_ids[:, 1].double(), rollout.rewards)
    assert {request.rollout for request in first.requests} == {2}
    assert rollout.rewards.unique().tolist() == ([8.0, 9.0] if row == "data" else [4.0, 5.0])
    assert {request.sampling.temperature for request in first.requests} == {1.0 if row == "data" else 0.5}


def test_rollouts_ahead_of_rows_with_other_pictures_are_generated_again(tmp_path: Path) -> None:
    def shown(color: str) -> PromptDataModule:
        row = {"prompt": [{"role": "user", "content": "red"}], "images": [picture(color)]}
        return PromptDataModule([row] * 16, 4, shuffle=False)

    policy: Options = {"policy": partial(vision_model, "qwen2_5_vl"), "tokenizer": PROCESSORS["qwen2_5_vl"]()}
    options: Options = {**policy, "max_staleness": 1}
    start(tmp_path / "a.ckpt", end=4, data=shown("red"), **options)
    first = resume(tmp_path / "a.ckpt", data=shown("blue"), **options, allow_config_changes=["data"])
    pixels = {int(request.media.pictures[0][0, 0, 2]) for request in first.requests if request.media is not None}
    assert {request.rollout for request in first.requests} == {2} and pixels == {255}


def test_rollouts_ahead_of_another_number_of_prompts_are_left_out(tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", end=4, data=tiny_prompts(shuffle=False), max_staleness=1)
    allowed: Options = {"allow_config_changes": ["data"], "max_staleness": 1}
    first = resume(tmp_path / "a.ckpt", data=tiny_prompts(16, 2, shuffle=False), **allowed)
    assert first.rollout is not None and first.rollout.sample_ids.tolist() == list(range(12 * 4, 14 * 4))


# What is compared, and how a difference is named.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two of four rollouts."""
    path = tmp_path_factory.mktemp("run") / "step=2.ckpt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start(path, callbacks=[NoEOSMask()])
    return path


def masked(checkpoint: Path, *, callbacks: Sequence[Callback] | None = None, **options: Any) -> FirstStep:
    return resume(checkpoint, callbacks=[NoEOSMask()] if callbacks is None else callbacks, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "name", "difference"),
    [
        ({"seed": 1}, "seed", "seed: 0 in the checkpoint, 1 now"),
        ({"group_size": 2}, "group_size", "group_size: 4 in the checkpoint, 2 now"),
        ({"temperature": 0.5}, "sampling", "sampling.temperature: 1.0 in the checkpoint, 0.5 now"),
        ({"loss": "reinforce"}, "loss", "loss: ClippedSurrogate in the checkpoint, Reinforce now"),
        ({"loss": ClippedSurrogate(clip_high=0.3)}, "loss", "loss.clip_high: 0.2 in the checkpoint, 0.3 now"),
        ({"advantages": "rloo"}, "advantages", "advantages: GRPO in the checkpoint, RLOO now"),
        ({"rewards": longer}, "rewards", "rewards.functions.longer: nothing in the checkpoint"),
        (
            {"rewards": {"parity_reward": (parity_reward, 2.0)}},
            "rewards",
            "rewards.functions.parity_reward.1: 1.0 in the checkpoint, 2.0 now",
        ),
        (
            {"optimizer": partial(AdamW, lr=1e-3, weight_decay=0.0)},
            "optimizer",
            "lr: 0.01 in the checkpoint, 0.001",
        ),
        (
            {"lr_scheduler": warmup_then_linear(1, 9)},
            "lr_scheduler",
            "lr_scheduler: None in the checkpoint, {'partial': ",
        ),
        ({"max_staleness": 1, "loss": "ppo"}, "max_staleness", "max_staleness: 0 in the checkpoint, 1 now"),
        ({"max_grad_norm": 0.5}, "max_grad_norm", "max_grad_norm: 1.0 in the checkpoint, 0.5 now"),
        ({"callbacks": []}, "corrections", "corrections.no_eos_mask: NoEOSMask in the checkpoint, nothing now"),
        ({"callbacks": [NoEOSMask(), OPSM()]}, "corrections", "corrections.opsm: nothing in the checkpoint, OPSM now"),
        ({"callbacks": [NoEOSMask("drop_tokens")]}, "corrections", "corrections.no_eos_mask.action: 'zero_reward' in"),
        (
            {"trainer": {"precision": "bf16-mixed"}},
            "precision",
            "precision: '32-true' in the checkpoint, 'bf16-mixed' now",
        ),
        ({"data": tiny_prompts(12)}, "data", "data.prompts.rows: 16 in the checkpoint, 12 now"),
        ({"data": tiny_prompts(seed=3)}, "data", "data.seed: 0 in the checkpoint, 3 now"),
        ({"data": tiny_prompts(shuffle=False)}, "data", "data.shuffle: True in the checkpoint, False now"),
    ],
)
def test_each_difference_is_named(checkpoint: Path, options: dict[str, Any], name: str, difference: str) -> None:
    with pytest.raises(ValueError, match="expected the configuration of the checkpoint, got another") as refused:
        masked(checkpoint, **options)
    message = str(refused.value)
    assert difference in message
    assert f"allow_config_changes=['{name}']" in message
    check_only(message, difference)


def check_only(message: str, difference: str) -> None:
    """Nothing else is named; other data have another fingerprint as well."""
    lines = [line for line in message.splitlines() if line.startswith("  ")]
    others = [line for line in lines if difference not in line and "fingerprint" not in line]
    assert others == [] or difference.startswith("rewards.functions.longer"), others


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        (warmup_then_linear(1, 90), "lr_scheduler.keywords.total: 9 in the checkpoint, 90 now"),
        (None, "lr_scheduler: {'partial'.* in the checkpoint, None now"),
        (
            partial(CosineAnnealingLR, T_max=5),
            "lr_scheduler.partial: '.*WarmupThenLinear' in .* '.*CosineAnnealingLR' now",
        ),
    ],
)
def test_another_schedule_is_named(now: Any, difference: str, tmp_path: Path) -> None:
    start(tmp_path / "a.ckpt", step=1, lr_scheduler=WARMUP)
    with pytest.raises(ValueError, match=difference):
        resume(tmp_path / "a.ckpt", lr_scheduler=now)


def test_several_differences_are_named_at_once(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"allow_config_changes=\['seed', 'corrections'\]"):
        masked(checkpoint, seed=1, callbacks=[])
    with pytest.raises(ValueError, match=r"allow_config_changes=\['corrections'\]"):
        masked(checkpoint, seed=1, callbacks=[], allow_config_changes=["seed"])


def test_steps_per_rollout_cannot_change_within_a_run(checkpoint: Path) -> None:
    with pytest.raises(
        ValueError, match="start a new run from its weights, since minibatches_per_rollout cannot change within a run"
    ):
        masked(checkpoint, minibatches_per_rollout=2, allow_config_changes=["minibatches_per_rollout"])


def test_what_bends_no_result_may_change(checkpoint: Path) -> None:
    module = {"max_tokens_per_microbatch": 64, "packing": False}
    rewards = Rewards(parity_reward, timeout=9.0, max_failure_rate=None)
    expected, first = masked(checkpoint), masked(checkpoint, rewards=rewards, **module)
    assert first.rollout is not None and expected.rollout is not None
    assert torch.equal(first.rollout.response_ids, expected.rollout.response_ids)


def compare(option: str, before: Any, now: Any, allow_config_changes: Sequence[str] = ()) -> None:
    """Compares two configurations that differ in one option."""
    old, new = (
        {"module": {option: describe(value)}, "corrections": {}, "data": {}, "trainer": {"precision": "32-true"}}
        for value in (before, now)
    )
    check_resume(old, new, allow_config_changes)


def sandboxed(**options: Any) -> Rewards:
    """Return rewards with a sandbox in an option of a function."""
    return Rewards({"tests": partial(parity_reward, sandbox=Sandbox(**options))})


@pytest.mark.parametrize(
    ("option", "before", "now"),
    [
        (
            "environment",
            Conversations(Echo, max_turns=4),
            Conversations(Echo, max_turns=4, workers=2, step_timeout=9.0, timeout=90.0, max_failure_rate=None),
        ),
        ("environment", Conversations(Echo, workers=RayWorkers(2)), Conversations(Echo, workers=RayWorkers(3, cpus=2))),
        (
            "rewards",
            Rewards(parity_reward, workers=RayWorkers(2)),
            Rewards(parity_reward, workers=RayWorkers(3), timeout=9.0),
        ),
        (
            "rewards",
            Rewards(SubprocessReward(parity_reward)),
            Rewards(SubprocessReward(parity_reward, processes=RayWorkers(2), seconds=9.0)),
        ),
        ("rewards", sandboxed(seconds=2.0), sandboxed(seconds=2.0, workers=RayWorkers(2))),
    ],
)
def test_workers_and_limits_of_failures_may_change(option: str, before: Any, now: Any) -> None:
    compare(option, before, now)


def test_time_limits_that_decide_scores_may_not_change() -> None:
    with pytest.raises(ValueError, match=r"sandbox.seconds: 2.0 in the checkpoint, 3.0 now"):
        compare("rewards", sandboxed(seconds=2.0), sandboxed(seconds=3.0))


@pytest.mark.parametrize(
    ("option", "before", "now", "difference"),
    [
        ("environment", Conversations(Echo), Conversations(Echo, max_turns=4), "environment.max_turns: 8 in .*, 4 now"),
        (
            "environment",
            Conversations(Echo),
            Conversations(Rewriting),
            "environment.source.name: .*Echo' in .*Rewriting",
        ),
        ("environment", Conversations(Echo), None, "environment: Conversations in the checkpoint, None now"),
        (
            "critic",
            Critic("shared"),
            Critic("shared", loss=ValueLoss(coef=0.5)),
            "critic.loss.coef: 1.0 in .*0.5 now",
        ),
        ("critic", None, Critic("shared"), "critic: None in the checkpoint, Critic now"),
    ],
)
def test_a_difference_nested_in_a_group_is_named(option: str, before: Any, now: Any, difference: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){difference}.*allow_config_changes=\['{option}'\]"):
        compare(option, before, now)
    compare(option, before, now, [option])


def closing(*values: Any) -> Callable[[], Any]:
    return lambda: values


class Clips:
    """A class of a user."""


CUT: dict[str, tuple[Any, Any, str]] = {  # what differs lies beyond what a message shows of a value
    "weight of a closure": (
        {"a": (closing("x" * 200), 1.0)},
        {"a": (closing("x" * 200), 0.5)},
        r"rewards.a.1: 1.0 in the checkpoint, 0.5 now",
    ),
    "value in a closure": ([closing(*"abcdefgh", 1)], [closing(*"abcdefgh", 2)], r"'h', 1\] .* 'h', 2\] now"),
    "classes of one name": (
        Clips(),
        type("Clips", (), {"__module__": "b"})(),
        r"\.Clips'.* in the checkpoint, .*'b\.Clips'",
    ),
    "argument of a configuration": (
        partial(LlamaForCausalLM, LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
        partial(LlamaForCausalLM, LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
        r"rewards.args.0.rope_parameters.rope_theta: 10000.0 in the checkpoint, 100000.0 now",
    ),
    "end of a text": ("You are kind. " * 20 + "a", "You are kind. " * 20 + "b", r"kind. a' in the check.*kind. b' now"),
    "length of a list": (
        ["abcdefghij"] * 12,
        ["abcdefghij"] * 13,
        r"'abcdefghij'\] in the checkpoint, .*, 'abcdefghij'",
    ),
}


@pytest.mark.parametrize("row", CUT)
def test_a_message_shows_where_long_values_differ(row: str) -> None:
    before, now, difference = CUT[row]
    with pytest.raises(ValueError, match=difference) as refused:
        compare("rewards", before, now)
    lines = [line for line in str(refused.value).splitlines() if line.startswith("  ")]
    assert len(lines) == 1 and len(lines[0]) < 250


def test_who_only_looks_on_may_come_and_go(checkpoint: Path) -> None:
    watched = masked(checkpoint, callbacks=[NoEOSMask(), SignalLedger(), SignalAudit()])
    pairs = zip(watched.after, masked(checkpoint).after, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_checkpoint_of_another_project_is_named(tmp_path: Path, checkpoint: Path) -> None:
    foreign = torch.load(checkpoint, weights_only=True)
    del foreign["lightning_rl"]
    torch.save(foreign, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="expected a checkpoint of an RLLightningModule to resume from"):
        resume(tmp_path / "foreign.ckpt")


@pytest.mark.parametrize(
    ("entry", "content"), [("fit", "dictionary"), ("validate", "weights"), ("test", "tensor"), ("predict", "weights")]
)
def test_a_file_that_no_trainer_wrote_is_named(entry: str, content: str, tmp_path: Path) -> None:
    weights = tiny_policy().state_dict()
    contents = {"dictionary": {"state_dict": weights}, "weights": weights, "tensor": torch.ones(1)}
    torch.save(contents[content], tmp_path / "plain.ckpt")
    trainer = a_trainer(max_steps=1, default_root_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"an RLLightningModule, got .*plain\.ckpt, which another program wrote: pass a file"
    ):
        getattr(trainer, entry)(tiny_module(), tiny_prompts(validation=[[2]]), ckpt_path=tmp_path / "plain.ckpt")


def test_a_checkpoint_of_another_module_is_named_by_every_entry(tmp_path: Path) -> None:
    other = a_trainer(max_steps=1, default_root_dir=tmp_path)
    other.fit(BoringModel(), DataLoader(RandomDataset(32, 2)))
    other.save_checkpoint(tmp_path / "other.ckpt")
    for entry in ("fit", "validate", "test", "predict"):
        with pytest.raises(ValueError, match="RLLightningModule to resume from or to evaluate, got one of another mod"):
            getattr(a_trainer(max_steps=1, default_root_dir=tmp_path), entry)(
                tiny_module(), tiny_prompts(validation=[[2]]), ckpt_path=tmp_path / "other.ckpt", weights_only=True
            )


def test_other_versions_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="torch 2.12.0 -> 2.13.0"):
        warn_of_versions({"versions": {"torch": "2.12.0"}}, {"versions": {"torch": "2.13.0"}})
