"""RolloutLoop: the scored samples of one rollout after another, generated when needed or ahead of training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_rl.corrections import Stat
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.distributed import Parallel
from lightning_rl.generation import Engine
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.rollouts.sample import Sampler, Samples, ScoredGroups, check_staleness, distribute_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLoop(ABC):
    """Generation and scoring of rollouts; every rank has to call each method.

    Args:
        sampler: Sampler of the run.
        stream: Source of the prompts.
        parallel: Strategy of the run.
        sync: Sends the weights to the engine under the number of a rollout.
        phase: Context that shows and measures a phase.
        prefetcher: Rollouts that are generated ahead.
        max_staleness: Maximum number of rollouts generated ahead.
        skipped: Numbers of rollouts to skip.
    """

    sampler: Sampler
    stream: PromptDataModule
    parallel: Parallel
    sync: Callable[[int], None]
    phase: Callable[[str], AbstractContextManager[object]]
    prefetcher: Prefetcher
    max_staleness: int = 0
    skipped: Collection[int] = ()

    @staticmethod
    def of(module: Any) -> "RolloutLoop":
        """Return the loop of a module in a fit."""
        return (Ahead if module.max_staleness else Synchronous)(
            sampler=module.sampler,
            stream=module.prompt_stream,
            parallel=module.parallel,
            sync=module.sync,
            phase=module.run.times.phase,
            prefetcher=module.run.prefetcher,
            max_staleness=module.max_staleness,
            skipped=module.fault_tolerance.skip_rollouts,
        )

    @abstractmethod
    def sample(self, number: int, end: float) -> ScoredGroups:
        """Return the scored samples of a rollout.

        Args:
            number: Number of the rollout.
            end: Number of the first rollout after the end of the fit; infinity if unknown.
        """

    def skip(self, number: int, *, generated: bool) -> None:
        """Drop a rollout, but consume its prompts, so that the other rollouts keep theirs."""
        rank_zero_info(f"rollout {number} is skipped (skip_rollouts)")
        if not generated and number not in self.prefetcher:
            self.next_prompts()
        self.prefetcher.drop(number)

    @property
    def groups(self) -> int:
        """Number of groups of a rollout on this rank."""
        return self.stream.prompts_per_rollout // self.parallel.ranks

    def next_prompts(self) -> list[Prompt]:
        """Return this rank's share of the prompts of one rollout."""
        ranks = self.parallel.ranks
        return distribute_prompts(self.stream.take(self.groups * ranks), [self.groups] * ranks)[self.parallel.rank]

    def _generate(self, prompts: Sequence[Prompt], number: int) -> Samples:
        return self.sampler.generate_together(self.sampler.requests(prompts, number))

    def _score(self, first: Samples, number: int) -> ScoredGroups:
        """Score the first round, and sample further ones until enough groups are kept."""
        rank = self.parallel.rank
        with self.phase("reward"):
            return self.sampler.fill_groups(self.stream.take, self.groups, number, rank=rank, first=first)


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


class Ahead(RolloutLoop):
    """Loop that generates up to ``max_staleness`` rollouts while the trainer works on earlier ones.

    An engine that is not concurrent generates one rollout at a time, and none during a weight sync.
    """

    __slots__ = ()

    @override
    def sample(self, number: int, end: float) -> ScoredGroups:
        sampler, submit, in_flight = self.sampler, partial(self._submit, number, end), self._in_flight(number)
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
        return scored._replace(stats={**scored.stats, **in_flight})

    def _in_flight(self, number: int) -> dict[str, Stat]:
        """Return metrics of the requests in flight before a rollout."""
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
        device = self.parallel.strategy.root_device
        submit = partial(self.prefetcher.submit, sampler=self.sampler, device=device, at_once=at_once)
        for ahead in range(number + (not concurrent), number + 1 + self.max_staleness):
            skipped, held = ahead in self.skipped, self.prefetcher.waiting_prompts(ahead)
            if held is not None and concurrent and not skipped:
                submit(ahead, held)
            elif ahead not in self.prefetcher and ahead < end:
                (self.prefetcher.hold if skipped else submit)(ahead, self.next_prompts())


def generates_concurrently(engine: Engine, max_staleness: int) -> bool:
    """Return True if several rollouts are generated at once, and generation continues during weight syncs."""
    return max_staleness > 1 and engine.capabilities.concurrent
