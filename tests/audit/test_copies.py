"""Copies share no state: repeated losses, estimators and corrections do not change the run."""

import os
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import fit, tiny_module, tiny_policy, weights_of
from torch import Tensor, nn
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, Rollout, Stat
from lightning_rl.advantages import DrGRPO
from lightning_rl.audit import SignalAudit
from lightning_rl.testing.properties.copies import CopyError, copy_state
from lightning_rl.utils.seeding import fork_generators

CALLS = [0]


def count_call() -> int:
    """Count calls in a global list."""
    CALLS[0] += 1
    return CALLS[0]


class Nested:
    """State at several depths."""

    def __init__(self) -> None:
        self.history: dict[str, list[int]] = {"seen": [1]}
        self.mean = torch.zeros(2)
        self.random, self.generator = random.Random(0), torch.Generator().manual_seed(3)
        self.model, self.norm = tiny_policy(), nn.BatchNorm1d(2)


def test_state_is_copied_at_every_depth_and_models_are_shared() -> None:
    thing = Nested()
    twin = copy_state(thing)
    twin.history["seen"].append(2)
    twin.mean += 1.0
    assert twin.random.random() == random.Random(0).random() and len(torch.rand(3, generator=twin.generator)) == 3
    assert thing.history == {"seen": [1]} and thing.mean.tolist() == [0.0, 0.0]
    assert thing.random.random() == random.Random(0).random()
    assert torch.equal(
        torch.rand(1, generator=thing.generator), torch.rand(1, generator=torch.Generator().manual_seed(3))
    )
    twin.norm(torch.ones(3, 2))
    assert twin.model is thing.model and thing.norm.num_batches_tracked == 0


def closure() -> Callable[[], list[int]]:
    seen = list[int]()

    def function() -> list[int]:
        seen.append(len(seen))
        return seen

    return function


def test_what_a_function_keeps_in_its_closure_and_in_globals_is_its_own() -> None:
    function = closure()
    twin = copy_state(function)
    assert twin() == [0] and twin() == [0, 1]
    assert function() == [0]
    CALLS[0] = 5
    assert [copy_state(count_call)() for _ in range(3)] == [6, 6, 6] and CALLS == [5]


class Following(DrGRPO):
    """A dataclass with slots and additional attributes."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "seen", [1])


def test_what_is_kept_beside_slots_is_copied() -> None:
    thing: Any = Following()
    twin = copy_state(thing)
    twin.seen.append(2)
    assert (thing.seen, twin.seen, repr(twin)) == ([1], [1, 2], repr(thing))


def test_a_copy_has_locks_of_its_own() -> None:
    thing: Any = Nested()
    thing.lock, thing.again, thing.event = threading.Lock(), threading.RLock(), threading.Event()
    with thing.lock, thing.again:
        twin = copy_state(thing)
    assert twin.lock.acquire(blocking=False) and not twin.event.is_set()
    assert isinstance(twin.again, type(thing.again)) and twin.again is not thing.again


def held(value: Any) -> Callable[[], Any]:
    return lambda: value


OPEN: dict[str, Callable[[], Any]] = {"generator": lambda: (i for i in range(3)), "file": lambda: os.fdopen(os.dup(1))}


@pytest.mark.parametrize("make", OPEN.values(), ids=OPEN)
def test_what_cannot_be_copied_is_refused_at_every_depth(make: Callable[[], Any]) -> None:
    thing: Any = Nested()
    value = thing.history["open"] = make()
    for one, name in ((thing, "Nested"), (held(value), "<lambda>"), (held(thing), "<lambda>")):
        with pytest.raises(CopyError, match=rf"^{name} holds state that cannot be copied \(cannot pickle "):
            copy_state(one)
    value.close()


class Forgetful(RLCallback):
    """A bonus that falls with every call, from an edited table and random numbers."""

    name = "forgetful"

    def __init__(self) -> None:
        self.table = {"bonus": [1.0]}

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        self.table["bonus"][0] *= 0.5
        return self.table["bonus"][0] * torch.rand(len(rollout)) + rollout.rewards * 0.0


def drifting() -> Callable[[LossView], Tensor]:
    """Return a loss with a weight that falls with every call."""
    calls = [0]

    def loss(view: LossView) -> Tensor:
        calls[0] += 1
        return -view.require("advantages") * view.logprobs / calls[0]

    return loss


SEEN = list[int]()


def noisy_judge(prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
    """Return random scores from the global generator that fall with every call."""
    SEEN.append(len(completion_ids))
    return [len(ids) % 3 + random.random() - 0.1 * len(SEEN) for ids in completion_ids]


class SeededJudge:
    """A judge with a seeded generator and a record of all completions."""

    def __init__(self) -> None:
        self.random, self.seen = random.Random(1), set[tuple[int, ...]]()

    def __call__(self, prompts: Any, completions: Any, *, completion_ids: Any, **_: Any) -> list[float]:
        """Return higher scores for new completions, with noise."""
        del prompts, completions
        novel = [tuple(ids) not in self.seen for ids in completion_ids]
        self.seen |= {tuple(ids) for ids in completion_ids}
        return [new + 0.1 * self.random.random() for new in novel]


def test_rewards_losses_and_corrections_with_a_state_train_the_same_with_and_without_the_audit(tmp_path: Path) -> None:
    weights = list[dict[str, Tensor]]()
    for audits in ([], [SignalAudit(1)]):
        SEEN.clear()
        module = tiny_module(
            rewards={"noisy": noisy_judge, "seeded": SeededJudge()}, loss=drifting(), minibatches_per_rollout=2
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the audit finds their effects
            fit(module, callbacks=[Forgetful(), *audits], default_root_dir=tmp_path)
        weights.append({**weights_of(module), "calls": torch.tensor(SEEN)})
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


class Penalty(RLCallback):
    """A penalty on the weights, whose gradient does not run through the log-probabilities."""

    name = "penalty"

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = pl_module

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        squares = sum(weight.square().sum() for weight in self.module.policy.parameters())
        return LossTerm(per_token=squares + view.logprobs * 0, coef=1e-3)


class OwnForward(Penalty):
    """A loss term that runs the model."""

    name = "own_forward"

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        logits = self.module.policy.model(input_ids=view.prompt_ids).logits
        return LossTerm(per_token=logits.square().mean() + view.logprobs * 0, coef=1e-3)


class Counter(RLCallback):
    """A bonus and metrics from a record of all calls, beside a part that a subclass holds."""

    name = "counter"

    def __init__(self, folder: Path) -> None:
        self.seen = [0]
        self.hold(folder)

    def hold(self, _folder: Path) -> None:
        """Hold a part, such as a lock."""
        self.lock = threading.Lock()

    def count(self) -> int:
        """Count a call."""
        self.seen[0] += 1
        return self.seen[0]

    @override
    def reward_bonus(self, rollout: Rollout) -> Tensor:
        return 0.01 * self.count() + rollout.rewards * 0

    @override
    def token_weight(self, view: LossView) -> Tensor:
        return torch.full_like(view.logprobs, 1.0 + 0.01 * self.count()).detach()

    @override
    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        return {"counter/calls": Stat.single(self.count())}

    @override
    @contextmanager
    def forward_context(self, rows: Rollout) -> Any:
        self.count()
        yield


class Filing(Counter):
    """Writes the calls to an open file."""

    @override
    def hold(self, _folder: Path) -> None:
        self.file = (_folder / "calls").open("w")

    @override
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.file.close()

    @override
    def count(self) -> int:
        self.file.write(f"{super().count()}\n")
        return self.seen[0]


class Numbering(Counter):
    """Takes the numbers of calls from a generator."""

    @override
    def hold(self, _folder: Path) -> None:
        self.numbers = (number for number in range(10_000))

    @override
    def count(self) -> int:
        self.seen[0] = next(self.numbers)
        return self.seen[0]


class Averaging(Counter):
    """Counts in a metric and a normalization, which are modules of torch."""

    @override
    def hold(self, _folder: Path) -> None:
        self.mean, self.norm = MeanMetric(), nn.BatchNorm1d(1)

    @override
    def count(self) -> int:
        self.seen[0] += 1
        self.mean.update(self.seen[0])
        self.norm(torch.tensor([[1.0], [self.seen[0]]]))
        return float(self.mean.compute() + self.norm.running_mean)  # pyrefly: ignore[bad-return, unsupported-operation]


class ClassCounter(Counter):
    """Counts in an attribute of its class."""

    calls = 0

    @override
    def count(self) -> int:
        ClassCounter.calls += 1
        return ClassCounter.calls


def closure_counter(_folder: Path) -> Counter:
    """Return a correction that counts in a variable around its class."""
    calls = 0

    class Inner(Counter):
        @override
        def count(self) -> int:
            nonlocal calls
            calls += 1
            return calls

    return Inner(_folder)


class GlobalCounter(Counter):
    """Counts in a global of its file."""

    @override
    def count(self) -> int:
        global GLOBAL
        GLOBAL += 1
        return GLOBAL


GLOBAL = 0


def numbering_loss() -> Callable[[LossView], Tensor]:
    """Return a loss with weights that fall with every call, from a generator."""
    seen = [0]
    numbers = (number for number in range(1, 10_000))

    def loss(view: LossView) -> Tensor:
        seen[0] = next(numbers)
        return -view.require("advantages") * view.logprobs / seen[0]

    return loss


NEUTRAL: dict[str, Callable[[Path], dict[str, Any]]] = {
    "penalty": lambda _: {"callbacks": [Penalty()]},
    "own forward": lambda _: {"callbacks": [OwnForward()]},
    "lock": lambda folder: {"callbacks": [Counter(folder)]},
    "module": lambda folder: {"callbacks": [Averaging(folder)]},
    "class attribute": lambda folder: {"callbacks": [ClassCounter(folder)]},
    "closure of a class": lambda folder: {"callbacks": [closure_counter(folder)]},
    "global": lambda folder: {"callbacks": [GlobalCounter(folder)]},
    "file": lambda folder: {"callbacks": [Filing(folder)]},
    "generator": lambda folder: {"callbacks": [Numbering(folder)]},
    "generator of a loss": lambda _: {"loss": numbering_loss()},
}
UNCOPIED = {"file": "Filing", "generator": "Numbering", "generator of a loss": "FunctionLoss"}


@pytest.mark.parametrize("case", NEUTRAL)
def test_an_audited_run_is_the_run(case: str, tmp_path: Path) -> None:
    weights, audit = list[dict[str, Tensor]](), SignalAudit(1)
    for name, audits in (("plain", []), ("audited", [audit])):
        (folder := tmp_path / name).mkdir()
        ClassCounter.calls = globals()["GLOBAL"] = 0
        options = NEUTRAL[case](folder)
        callbacks = options.pop("callbacks", [])
        module = tiny_module(minibatches_per_rollout=2, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the audit finds that results depend on the number of calls
            fit(module, callbacks=[*callbacks, *audits], default_root_dir=folder, max_steps=8)
        seen = [callback.seen[0] for callback in callbacks if isinstance(callback, Counter)]
        gradients = {f"{n}.grad": p.grad for n, p in module.required_policy.named_parameters() if p.grad is not None}
        weights.append({**weights_of(module), **gradients, "seen": torch.tensor(seen)})
    assert weights[0].keys() == weights[1].keys()
    assert [name for name, weight in weights[0].items() if not torch.equal(weights[1][name], weight)] == []
    reasons = set(audit.skipped.values())
    assert (case in UNCOPIED) == any("holds state that cannot be copied" in reason for reason in reasons)
    assert all(UNCOPIED[case] in reason for reason in reasons if "cannot be copied" in reason)


def test_global_generators_are_where_they_were() -> None:
    torch.manual_seed(0)
    random.seed(0)
    with fork_generators(torch.device("cpu")):
        assert len(torch.rand(5)) == 5 and random.random() < 1
    numbers = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert numbers == (torch.rand(1), random.random())
