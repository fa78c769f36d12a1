"""RolloutLoop: the scored samples of one rollout after another, generated when needed or ahead of training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from typing_extensions import override

from lightning_rl.corrections import Stat
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.generation import Engine
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.rollouts.sample import Sampler, Samples, ScoredGroups, check_staleness, distribute_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoop(ABC):
    """Generation and scoring of rollouts; every rank has to call each method.

    Args:
        sampler: Sampler of the run.
        stream: Source of the prompts.
        rank: Rank of this process among those that generate.
        ranks: Number of such ranks.
        sync: Sends the weights to the engine under the number of a rollout.
        phase: Context that shows and measures a phase.
    """

    sampler: Sampler
    stream: PromptDataModule
    rank: int
    ranks: int
    sync: Callable[[int], None]
    phase: Callable[[str], AbstractContextManager[object]]

    @abstractmethod
    def sample(self, number: int, end: float) -> ScoredGroups:
        """Return the scored samples of a rollout.

        Args:
            number: Number of the rollout.
            end: Number of the first rollout after the end of the fit; infinity if unknown.
        """

    def skip(self, number: int) -> None:
        """Consume the prompts of a skipped rollout, so that the other rollouts keep theirs."""
        del number
        self.next_prompts()

    def in_flight(self, number: int) -> dict[str, Stat]:
        """Return metrics of the requests in flight before a rollout."""
        del number
        return {}

    def next_prompts(self) -> list[Prompt]:
        """Return this rank's share of the prompts of one rollout."""
        share = self.stream.prompts_per_rollout // self.ranks
        return distribute_prompts(self.stream.take(share * self.ranks), [share] * self.ranks)[self.rank]

    def _generate(self, prompts: Sequence[Prompt], number: int) -> Samples:
        return self.sampler.generate_together(self.sampler.requests(prompts, number))

    def _score(self, first: Samples, number: int) -> ScoredGroups:
        """Score the first round, and sample further ones until enough groups are kept."""
        groups = self.stream.prompts_per_rollout // self.ranks
        with self.phase("reward"):
            return self.sampler.fill_groups(self.stream.take, groups, number, rank=self.rank, first=first)


class Synchronous(RolloutLoop):
    """Loop that generates each rollout with the current weights."""

    __slots__ = ()

    @override
    def sample(self, number: int, end: float) -> ScoredGroups:
        with self.phase("sync"):
            self.sync(number)
        with self.phase("generate"):
            first = self._generate(self.next_prompts(), number)
        scored = self._score(first, number)
        check_staleness(scored.rollout, number, 0)
        return scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead(RolloutLoop):
    """Loop that generates up to ``max_staleness`` rollouts while the trainer works on earlier ones.

    An engine that is not concurrent generates one rollout at a time, and none during a weight sync.

    Args:
        prefetcher: Rollouts that are generated ahead.
        max_staleness: Maximum number of rollouts generated ahead.
        skipped: Numbers of rollouts to skip.
        device: Device of the policy.
    """

    prefetcher: Prefetcher
    max_staleness: int
    skipped: Collection[int]
    device: torch.device

    @override
    def sample(self, number: int, end: float) -> ScoredGroups:
        sampler, submit = self.sampler, partial(self._submit, number, end)
        first = None if self.concurrent else self._take(number)
        with self.phase("sync"):
            self.sync(number)
        if self.concurrent:  # submit all rollouts that may be generated with these weights
            submit()
            first = self._take(number)
        with self.phase("generate"):
            if not isinstance(first, Samples):
                first = self._generate(first or self.next_prompts(), number)
        if sampler.max_rounds == 1:  # the engine has no more requests for this rollout
            submit()
        scored = self._score(first, number)
        submit()
        check_staleness(scored.rollout, number, self.max_staleness)
        return scored

    @override
    def skip(self, number: int) -> None:
        if number not in self.prefetcher:
            self.next_prompts()

    @override
    def in_flight(self, number: int) -> dict[str, Stat]:
        in_flight = self.sampler.engine.in_flight
        tokens, oldest = in_flight.tokens(), in_flight.oldest()
        age = Stat.single(0 if oldest is None else number - oldest)
        return {"in_flight/tokens": Stat.single(tokens), "in_flight/staleness": age.maximum()}

    @property
    def concurrent(self) -> bool:
        """True if rollouts are generated concurrently and generation continues during weight syncs."""
        return generates_concurrently(self.sampler.engine, self.max_staleness)

    def _take(self, number: int) -> Samples | Sequence[Prompt] | None:
        """Return the samples or waiting prompts of a rollout that was submitted; None for one that was not."""
        with self.phase("wait"):
            if self.sampler.corrections.contributors("keep_groups") and not self.concurrent:
                self.prefetcher.drain()  # the engine must be free to resample groups that a filter drops
            return self.prefetcher.take(number)

    def _submit(self, number: int, end: float) -> None:
        """Submit the next rollouts, up to the end of the fit."""
        concurrent = self.concurrent
        at_once = 1 + self.max_staleness if concurrent else 1
        submit = partial(self.prefetcher.submit, sampler=self.sampler, device=self.device, at_once=at_once)
        for ahead in range(number + (not concurrent), number + 1 + self.max_staleness):
            skipped, held = ahead in self.skipped, self.prefetcher.waiting_prompts(ahead)
            if held is not None and concurrent and not skipped:
                submit(ahead, held)
            elif ahead not in self.prefetcher and ahead < end:
                (self.prefetcher.hold if skipped else submit)(ahead, self.next_prompts())


def generates_concurrently(engine: Engine, max_staleness: int) -> bool:
    """Return True if several rollouts are generated at once, and generation continues during weight syncs."""
    return max_staleness > 1 and engine.capabilities.concurrent
