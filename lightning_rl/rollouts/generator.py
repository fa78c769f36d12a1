"""RolloutGenerator: syncs the weights, and generates and rewards one rollout, when needed or ahead of training."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from lightning_rl.corrections import Stat
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.distributed import Parallel, failing_together
from lightning_rl.generation import Engine, EngineError
from lightning_rl.rollouts.prefetch import Prefetcher
from lightning_rl.rollouts.sample import Collected, Sampled, Sampler, check_staleness, distribute_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGenerator:
    """Sync, generation and rewards of one rollout, with the current weights; every rank has to call each method.

    Requests up to ``max_staleness`` further rollouts, while the trainer works on earlier ones. An engine that is not
    concurrent generates one rollout at a time, and none during a weight sync.

    Args:
        number: Number of the rollout.
        end: End of the fit in rollouts since the start of the run, such as 2.5; infinity if unknown.
        sampler: Sampler of the run.
        data: Source of the prompts.
        parallel: Strategy of the run.
        send: Sends the weights to the engine, with the number of the rollout as version.
        phase: Context manager that shows a phase and measures its time.
        prefetcher: Rollouts that are generated ahead.
        max_staleness: Maximum number of rollouts generated ahead.
        skipped: Numbers of rollouts to skip.
        in_flight: Metrics of the requests in flight before the rollout.
    """

    number: int
    end: float
    sampler: Sampler
    data: PromptDataModule
    parallel: Parallel
    send: Callable[[int], None]
    phase: Callable[[str], AbstractContextManager[object]]
    prefetcher: Prefetcher
    max_staleness: int
    skipped: Collection[int]
    in_flight: Mapping[str, Stat]

    def sync(self) -> Sampled | Sequence[Prompt] | None:
        """Send the weights to the engine; return samples or prompts of this rollout requested ahead, or None."""
        ahead = None if self.concurrent else self._take()
        with self.phase("sync"):
            self.send(self.number)
        if not self.concurrent:
            return ahead
        self._submit()  # all rollouts that may be generated with these weights
        return self._take()

    def generate(self, ahead: Sampled | Sequence[Prompt] | None) -> Sampled:
        """Return the samples of the first round; generate them unless ``ahead`` has them."""
        with self.phase("generate"):
            samples = ahead if isinstance(ahead, Sampled) else self._generate(ahead or self.next_prompts())
        if self.sampler.max_rounds == 1:  # the engine has no more requests for this rollout
            self._submit()
        return samples

    def _generate(self, prompts: Sequence[Prompt]) -> Sampled:
        logprobs = self.sampler.reads_logprobs(self.number)
        with failing_together("generation", EngineError):
            return self.sampler.generate(self.sampler.open(prompts, self.number), logprobs=logprobs)

    def reward(self, samples: Sampled) -> Collected:
        """Score the first round, and sample further ones until enough groups are kept."""
        take, rank, number = self.data.take, self.parallel.rank, self.number
        with self.phase("reward"):
            groups = self.sampler.fill_groups(take, self.groups, number, rank=rank, first=samples)
        check_staleness(groups.rollout, number, self.max_staleness)
        self._submit()
        return groups._replace(stats={**groups.stats, **self.in_flight})

    @property
    def groups(self) -> int:
        """Number of groups of a rollout on this rank."""
        return self.data.prompts_per_rollout // self.parallel.ranks

    def next_prompts(self) -> list[Prompt]:
        """Return this rank's share of the prompts of one rollout."""
        ranks = self.parallel.ranks
        return distribute_prompts(self.data.take(self.groups * ranks), [self.groups] * ranks)[self.parallel.rank]

    @property
    def concurrent(self) -> bool:
        """True if rollouts are generated concurrently and generation continues during weight syncs."""
        return generates_concurrently(self.sampler.engine, self.max_staleness)

    def _take(self) -> Sampled | Sequence[Prompt] | None:
        """Return the samples or waiting prompts of this rollout if it was submitted; None otherwise."""
        if not self.max_staleness:
            return None
        with self.phase("wait"):
            if self.sampler.corrections.contributors("keep_groups") and not self.concurrent:
                self.prefetcher.drain()  # the engine must be free to resample groups that a filter drops
            return self.prefetcher.take(self.number)

    def _submit(self) -> None:
        """Submit the next rollouts, up to the end of the fit."""
        number, concurrent = self.number, self.concurrent
        at_once = 1 + self.max_staleness if concurrent else 1
        device = self.parallel.strategy.root_device
        submit = partial(self.prefetcher.submit, sampler=self.sampler, device=device, at_once=at_once)
        for ahead in range(number + (not concurrent), number + 1 + self.max_staleness):
            skipped, held = ahead in self.skipped, self.prefetcher.waiting_prompts(ahead)
            if held is not None and concurrent and not skipped:
                submit(ahead, held)
            elif ahead not in self.prefetcher and ahead < self.end:
                (self.prefetcher.hold if skipped else submit)(ahead, self.next_prompts())


def generates_concurrently(engine: Engine, max_staleness: int) -> bool:
    """Return True if several rollouts are generated at once, and generation continues during weight syncs."""
    return max_staleness > 1 and engine.capabilities.concurrent


def in_flight(engine: Engine, number: int) -> dict[str, Stat]:
    """Return metrics of the requests in flight before a rollout."""
    oldest = engine.in_flight.oldest()
    age = Stat.single(0 if oldest is None else number - oldest)
    return {"in_flight/tokens": Stat.single(engine.in_flight.tokens()), "in_flight/staleness": age.maximum()}
