"""The table of contributions is complete, and copies that are alone leave the callbacks of the run untouched."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

import pytest
import torch
from kit.support import SummedBy, callback_of, ragged_rollout
from typing_extensions import override

from lightning_rl import RLCallback, Rollout
from lightning_rl.callbacks import OPSM, AdaptiveKL
from lightning_rl.corrections import CONTRIBUTIONS, Corrections
from lightning_rl.corrections.call_user import VersionGuard
from lightning_rl.corrections.recorded import ReplayCorrections
from lightning_rl.corrections.rl_callback import Contribution
from lightning_rl.distributed import ALONE
from lightning_rl.signal.masked import local_sum
from lightning_rl.utils.mutation_guard import Fields

NO_CONTRIBUTION = {"with_name", "reads_logprobs", "traces_step", "after_step"}
RETURNS = {
    "numbers",
    "row mask",
    "row float",
    "token mask",
    "token float",
    "term",
    "tensors",
    "context",
    "stats",
    "nothing",
}
BENDS = {"", "prompts", "rows", "rewards", "policy loss", "loss", "forward"}


def test_every_entry_is_a_method_of_the_base_class_and_every_method_an_entry() -> None:
    methods = {name for name, _ in inspect.getmembers(RLCallback, inspect.isfunction) if name in vars(RLCallback)}
    assert {name for name in methods if not name.startswith("_")} - NO_CONTRIBUTION == set(CONTRIBUTIONS)


@pytest.mark.parametrize("name", CONTRIBUTIONS)
def test_every_entry_says_what_is_known_of_it(name: str) -> None:
    entry = CONTRIBUTIONS[name]
    assert entry.when in get_args(get_type_hints(Contribution)["when"])
    assert entry.returns in RETURNS and entry.affects in BENDS
    assert (entry.when == "watch") == (entry.returns == "nothing") == (not entry.combined_by)
    assert not (entry.affects and entry.when == "watch"), "who only looks bends nothing"


@pytest.mark.parametrize("name", CONTRIBUTIONS)
def test_whoever_overrides_a_method_is_its_contributor(name: str) -> None:
    callback = callback_of("callback", **{name: lambda seen: seen})
    corrections = Corrections([callback])
    assert callback.contributes == {name} and corrections.contributors(name) == (callback,)
    assert corrections.contributors(*(other for other in CONTRIBUTIONS if other != name)) == ()


def test_contributors_of_several_methods_are_there_once_in_the_order_of_their_names() -> None:
    both = callback_of("b", reward_mask=lambda seen: seen.trained, exclude=lambda seen: seen.trained)
    first = callback_of("a", exclude=lambda seen: seen.trained)
    assert Corrections([both, first]).contributors("reward_mask", "exclude") == (first, both)


class Counting(RLCallback):
    """Counts what it has observed."""

    name = "counting"
    number = 0

    @override
    def observe(self, rollout: Rollout) -> None:
        self.number += 1


def test_alone_the_callbacks_are_copies_without_collectives() -> None:
    live, collectives = [AdaptiveKL(), OPSM()], SummedBy(local_sum)
    corrections = Corrections(live, collectives)
    alone = corrections.alone()
    assert [callback.name for callback in alone.callbacks] == [callback.name for callback in corrections.callbacks]
    assert all(callback.collectives is ALONE for callback in alone.callbacks)
    assert all(callback.collectives is collectives for callback in corrections.callbacks)
    assert not set(map(id, alone.callbacks)) & set(map(id, live))


@pytest.mark.parametrize("kind", [Corrections, ReplayCorrections])
def test_what_happens_alone_leaves_the_state_of_the_run_untouched(kind: type[Corrections]) -> None:
    adaptive, counting = AdaptiveKL(0.5, horizon=1), Counting()
    corrections, rollout = kind([adaptive, counting]), ragged_rollout(dtype=torch.float64).sanitize()
    before = adaptive.state_dict()
    alone = corrections.alone()
    assert type(alone) is kind
    for _ in range(2):
        alone.observe(rollout)
    assert adaptive.state_dict() == before and counting.number == 0
    copied, counted = alone.contributors("observe")
    assert isinstance(counted, Counting) and counted.number == 2
    assert isinstance(copied, AdaptiveKL) and copied.state_dict() != before


class Noting(VersionGuard):
    """Notes every call of user code and the first argument."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    @override
    def around(self, who: str, shown: Callable[[], Fields], args: Sequence[object]) -> Any:
        self.calls.append((who, args[0]))
        return super().around(who, shown, args)


def test_the_guard_is_around_each_contribution_and_observation() -> None:
    mask, watcher = callback_of("mask", reward_mask=lambda seen: seen.trained), Counting()
    corrections, rollout, guard = Corrections([mask, watcher]), ragged_rollout(), Noting()
    corrections.guard = guard
    corrections.reward_mask(rollout)
    corrections.observe(rollout)
    assert [who for who, _ in guard.calls] == ["reward_mask of mask", "observe of counting"]
    assert all(isinstance(seen, Rollout) and seen is not rollout for _, seen in guard.calls)
