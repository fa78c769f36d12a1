"""Parts of a run: which the next stage reuses and which it makes, and when the engine starts and ends."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import pytest
from kit.conversations import talking_module
from kit.support import a_trainer, fit, tiny_prompts
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import WeightAveraging
from typing_extensions import override

from lightning_rl import RLLightningModule, TransformersEngine
from lightning_rl.callbacks import ReferenceKL

pytestmark = pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")

MODULE = [
    "policy",
    "models",
    "models.reference",
    "options.engine",
    "options.rewards",
    "run.evaluator",
    "run.ahead",
]
TRAINER = ["run.fault_tolerance", "parallel", "data_module"]
STAGE = ["run", "algorithm", "run.corrections", "run.needs", "run.environments", "run.configuration"]
FIT = ["run.progress", "run.log", "run.metrics", "run.optimizer"]
ONCE = ["start", "end_stage", "close"]


class Watched(TransformersEngine):
    """Embedded engine that keeps the calls that start and end it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @override
    def start(self, *args: Any, **options: Any) -> None:
        self.calls.append("start")
        super().start(*args, **options)

    @override
    def end_stage(self) -> None:
        self.calls.append("end_stage")
        super().end_stage()

    @override
    def close(self) -> None:
        self.calls.append("close")
        super().close()


class Parts(Callback):
    """Parts of the module at the end of each stage, before its teardown, and the order of its first hooks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, object]] = []
        self.built: list[bool] = []

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.built.append(pl_module.policy is not None)  # callbacks run before the module

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append({name: attrgetter(name)(pl_module) for name in [*MODULE, *TRAINER, *STAGE, *FIT]})

    on_validation_end = on_train_end


def train(module: RLLightningModule, *callbacks: Callback) -> None:
    fit(module, callbacks=[*callbacks, ReferenceKL(as_loss=True)], max_steps=2)


def train_twice(module: RLLightningModule, parts: Parts, *, closes: bool = False) -> None:
    train(module, parts)
    if closes:
        module.close_engine()
    train(module, parts)


def use_one_trainer(module: RLLightningModule, parts: Parts, *, stages: Sequence[str]) -> None:
    trainer, data = a_trainer([parts, ReferenceKL(as_loss=True)], max_steps=2), tiny_prompts(validation=[[2, 3]])
    for stage in stages:
        getattr(trainer, stage)(module, datamodule=data)


def answer_and_train(module: RLLightningModule, parts: Parts) -> None:
    module.generate([2, 3])
    before = {name: attrgetter(name)(module) for name in [*MODULE, *STAGE]}
    train(module, parts)
    parts.seen.insert(0, before)


Journey = Callable[[RLLightningModule, Parts], None]
JOURNEYS: dict[str, tuple[Journey, list[str], list[str]]] = {
    "two Trainers": (train_twice, [*TRAINER, *STAGE, *FIT], ONCE * 2),
    "two Trainers, closed": (partial(train_twice, closes=True), [*TRAINER, *STAGE, *FIT], [*ONCE, "close", *ONCE]),
    "fit, validate": (partial(use_one_trainer, stages=["fit", "validate"]), STAGE, ONCE * 2),
    "validate, fit": (partial(use_one_trainer, stages=["validate", "fit"]), [*STAGE, *FIT], ONCE * 2),
    "generate, fit": (answer_and_train, ["models.reference", *STAGE], ONCE * 2),
}


@pytest.mark.parametrize("journey", JOURNEYS)
def test_the_next_stage_makes_some_parts_and_reuses_the_others(journey: str) -> None:
    run, made, calls = JOURNEYS[journey]
    engine, parts = Watched(), Parts()
    run(talking_module(engine=engine), parts)
    first, last = parts.seen[0], parts.seen[-1]
    assert [name for name in first if first[name] is not last[name]] == made
    assert engine.calls == calls


def test_an_average_has_the_policy_built_before_the_setup_of_the_module() -> None:
    engine, parts, averaging = Watched(), Parts(), cast(Any, WeightAveraging())
    module = talking_module(engine=engine)
    train(module, averaging, parts)
    assert parts.built == [True]
    assert averaging._average_model.module.options.engine is not engine  # noqa: SLF001
    assert engine.calls == ONCE and parts.seen[0]["policy"] is module.policy
