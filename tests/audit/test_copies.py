"""Copies share no state: repeated losses, estimators and corrections do not change the run."""

import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kit.support import fit, tiny_module, weights_of
from torch import Tensor, nn
from typing_extensions import override

from lightning_rl import LossView, RLCallback, Rollout
from lightning_rl.advantages import DrGRPO
from lightning_rl.audit import SignalAudit
from lightning_rl.audit.copies import copy_state
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
        self.model = nn.Linear(2, 2)


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
    assert twin.model is thing.model


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
    assert (thing.seen, twin.seen, twin) == ([1], [1, 2], thing)


def test_what_cannot_be_copied_is_copied_one_level_deep() -> None:
    thing = Nested()
    thing.lock = threading.Lock()  # pyrefly: ignore[missing-attribute]
    twin: Any = copy_state(thing)
    assert twin is not thing and twin.lock is thing.lock  # pyrefly: ignore[missing-attribute]


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


def test_global_generators_are_where_they_were() -> None:
    torch.manual_seed(0)
    random.seed(0)
    with fork_generators(torch.device("cpu")):
        assert len(torch.rand(5)) == 5 and random.random() < 1
    numbers = torch.rand(1), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert numbers == (torch.rand(1), random.random())
