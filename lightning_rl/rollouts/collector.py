"""Collector: the scored groups of a rollout, sampled when needed or ahead, in rounds until enough groups are kept."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt, PromptDataModule
from lightning_rl.distributed import ALONE, Collectives, failing_together
from lightning_rl.environments import converse
from lightning_rl.environments.conversation import chat_span, end_chat
from lightning_rl.environments.outcome import metrics_of, reward_columns
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Completion, Engine, EngineError, Request, SamplingParams
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.policy.processor import processor_of
from lightning_rl.policy.sampling_mask import holds
from lightning_rl.rewards import RewardCall, Rewards
from lightning_rl.rewards.constant_calls import describe_constant_calls
from lightning_rl.rewards.correctness import solve_counts
from lightning_rl.rollout import GREEDY_SCORE, SAMPLING_MASK, FinishReason, Rollout, concatenate
from lightning_rl.rollouts.ahead import Ahead, Sampled
from lightning_rl.rollouts.failures import FailureReport, check_failures
from lightning_rl.samples import PROMPT, Trajectory
from lightning_rl.samples.seeds import GREEDY, request_seed, sample_id
from lightning_rl.utils.decoding import decode_completions
from lightning_rl.utils.tracing import Span


class RepeatedPromptError(ValueError):
    """The data module returned a prompt twice for one rollout."""


class Collected(NamedTuple):
    """Whole groups with their rewards.

    Attributes:
        rollout: Rows of the groups.
        stats: Counts of sampled groups, filtered groups, aborted rows, and rows that rewards failed on; with
            ``max_staleness``, metrics of the requests in flight before the rollout.
        logged: Metrics that reward functions logged; their names may differ between rollouts.
        constant_calls: Text of :func:`describe_constant_calls`.
    """

    rollout: Rollout
    stats: dict[str, Stat]
    logged: dict[str, Stat]
    constant_calls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Makes the scored groups of a rollout, now or ahead of training.

    Args:
        engine: Engine that generates.
        tokenizer: Decodes completions for the rewards; None to pass token ids only.
        rewards: Reward functions.
        sampling: Sampling parameters, with the ids that end a response.
        group_size: Number of samples per prompt.
        seed: Seed of the run.
        corrections: Callbacks; used for reward masks, kept groups and observers.
        dtype: Dtype of log-probabilities; rewards are in float64.
        forward_context: Context around generation that sets the precision.
        greedy_baseline: True to score a greedy completion of each prompt for ``extras["greedy_score"]``.
        collectives: Collectives over the ranks.
        rank: Rank of this process among those with different rows.
        device: Device of the policy.
        failed_folder: Folder for samples with failed rewards, next to that of failed environments; None to write none.
        trainer_state: Progress of the run, for rewards that take it.
        vocabulary: Vocabulary size of the policy; None if unknown.
        environments: Environments of the samples; None for single-turn completions.
        needs_logprobs: True if every rollout needs the engine's log-probabilities.
        mismatch_every_n_rollouts: Interval of the rollouts that have them for ``kl/rollout``.
        ahead: Rollouts that are generated ahead.
        skipped: Numbers of rollouts to skip.
        phase: Context manager that shows a phase and measures its time.
        model: Name of the policy in spans.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    rewards: Rewards
    sampling: SamplingParams
    group_size: int
    seed: int
    corrections: Corrections = field(default_factory=Corrections)
    dtype: torch.dtype = torch.float32
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    greedy_baseline: bool = False
    collectives: Collectives = ALONE
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    failed_folder: Path | None = None
    trainer_state: TrainerState | None = None
    vocabulary: int | None = None
    environments: Environments | None = None
    needs_logprobs: bool = False
    needs_roles: bool = False
    mismatch_every_n_rollouts: int = 1
    ahead: Ahead = field(default_factory=Ahead)
    skipped: Collection[int] = ()
    phase: Callable[[str], AbstractContextManager[object]] = nullcontext
    model: str = ""

    @property
    def max_rounds(self) -> int:
        """Maximum number of sampling rounds until enough groups are kept."""
        return max((callback.max_rounds for callback in self.corrections.contributors("keep_groups")), default=1)

    def collect(
        self,
        number: int,
        data: PromptDataModule,
        *,
        end: float,
        publish: Callable[[], None],
        show: Callable[[Sequence[Trajectory], int], None],
    ) -> Collected:
        """Publish the weights, and sample and score the groups of a rollout. A collective.

        Requests further rollouts, up to ``max_staleness``, while the trainer works on this one. An engine that is not
        concurrent generates one rollout at a time, and none while it receives weights.

        Args:
            number: Number of the rollout.
            data: Source of the prompts.
            end: End of the fit in rollouts since the start of the run, such as 2.5; infinity if unknown.
            publish: Sends the weights to the engine.
            show: Prints samples of the rollout with its number before they are scored.

        Raises:
            RewardError: On every rank, if rewards fail on too many rows.
            RuntimeError: If a token comes from weights that are too old; on the other ranks if generation, a correction
                or the arguments of a reward raise on one.
        """
        ahead, stats, ranks = self.ahead, self.ahead.in_flight(number), self.collectives.ranks
        groups = data.prompts_per_rollout // ranks

        def next_prompts() -> list[Prompt]:
            return distribute_prompts(data.take(groups * ranks), [groups] * ranks)[self.rank]

        submit = partial(ahead.submit, number, end, self.skipped, next_prompts, self._sample_later)
        idle = bool(self.corrections.contributors("keep_groups"))  # groups that a filter drops are sampled again
        taken = None if ahead.concurrent else ahead.take(number, self.phase, idle=idle)
        with self.phase("sync"):
            publish()
        if ahead.concurrent:
            submit()  # all rollouts that may be generated with these weights
            taken = ahead.take(number, self.phase)
        with self.phase("generate"):
            sampled = taken if isinstance(taken, Sampled) else self._sample_now(taken or next_prompts(), number)
        if self.max_rounds == 1:  # the engine has no more requests for this rollout
            submit()
        show(sampled.trajectories, number)
        with self.phase("reward"):
            collected = self.fill_groups(data.take, groups, number, first=sampled)
        ahead.check(collected.rollout, number)
        submit()
        return collected._replace(stats={**collected.stats, **stats})

    def fill_groups(
        self, take: Callable[[int], list[Prompt]], groups: int, number: int, *, first: Sampled
    ) -> Collected:
        """Return ``groups`` scored groups for this rank.

        Collectives run between the rounds, never within one.

        Args:
            take: Returns the next prompts, for further rounds.
            groups: Number of groups.
            number: Number of the rollout.
            first: Samples of the first round.
        """
        parts: list[Rollout] = []
        calls: list[RewardCall] = []
        conversations: list[Trajectory] = []
        report = FailureReport(self.rewards)
        sampled, missing, filtered, aborted, solved, unsolved = first, groups, 0, 0, 0, 0
        together = self.collectives.ranks > 1 and self.collectives.layers is None  # not where ranks shard layers
        for round_number in range(self.max_rounds):
            wanted = self.collectives.objects(missing)
            if not sum(wanted):
                break
            if round_number:
                prompts = distribute_prompts(take(sum(wanted)), wanted)[self.rank]
                # all rounds have equal fields, also after a resume
                sampled = self._sample_now(prompts, number, logprobs=first.logprobs)
            with failing_together("rewards and masks of them") if together else nullcontext():
                part, new, failing = self.reward(sampled)
                self.corrections.observe_generated(sampled.pairs)
                self.corrections.observe_rewards(part, new)
                part = part.replace(rewarded=part.rewarded & self.corrections.reward_mask(part))
                keep = self.corrections.keep_groups(part)
            calls = [*calls, *new]
            conversations += sampled.trajectories if self.environments else ()
            report.add(sampled.trajectories, new, failing)
            aborted += int((part.finish == FinishReason.ABORT).sum())
            solved, unsolved = (sum(pair) for pair in zip((solved, unsolved), solve_counts(part), strict=True))
            parts.append(part.select(keep))
            kept = int(keep.sum()) // self.group_size
            filtered += len(part) // self.group_size - kept
            missing -= kept
        logged = self._close(report, logged_metrics(calls, conversations), number)
        if missing:
            warnings.warn(f"{missing} groups are missing after {self.max_rounds} rounds of refilling", stacklevel=2)
        counts = {"groups/sampled": filtered + groups - missing, "groups/filtered": filtered}
        counts |= {"groups/solved": solved, "groups/unsolved": unsolved}
        counts |= {"engine/aborted": aborted, **report.stats()}
        stats = {name: stat.sum() for name, stat in Stat.numbers(counts).items()}
        weighted = [call for call in calls if self.rewards.weights[call.name]]
        return Collected(concatenate(parts), stats, logged, describe_constant_calls(weighted))

    def _close(self, report: FailureReport, logged: Mapping[str, Sequence[float]], number: int) -> dict[str, Stat]:
        """Report failures, end the run if there are too many, and return a metric for each name that a rank logged."""
        summary = report.write(self.failed_folder, f"rollout-{number}-rank-{self.rank}.jsonl")
        summary, logged = self.collectives.share((summary, logged))
        everyone = self.collectives.objects((summary, tuple(logged)))
        conversations = None if self.environments is None else self.environments.max_failure_rate
        check_failures([one for one, _ in everyone], number, self.rewards.max_failure_rate, conversations)
        names = sorted({name for _, names in everyone for name in names})
        return {name: Stat.of(torch.tensor(logged.get(name, []), dtype=torch.float64)) for name in names}

    def open(
        self,
        prompts: Sequence[Prompt],
        number: int,
        *,
        group_size: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> list[Trajectory]:
        """Return ``group_size`` samples of each prompt in rollout ``number``, without segments, and their baseline."""
        kinds = [(group_size or self.group_size, sampling or self.sampling, 0)]
        kinds += [(1, replace(self.sampling, temperature=0.0), GREEDY)] if self.greedy_baseline else []
        return [
            Trajectory(
                prompt=prompt,
                request=Request.of(
                    prompt,
                    sample_id=(each := sample_id(prompt.index, place, size, first=first)),
                    seed=request_seed(self.seed, number, each),
                    sampling=parameters,
                    rollout=number,
                ),
                baseline=first == GREEDY,
            )
            for size, parameters, first in kinds
            for prompt in (prompts if self.collectives.generates else ())
            for place in range(size)
        ]

    def reads_logprobs(self, number: int) -> bool:
        """Return True if anything reads the engine's log-probabilities in rollout ``number``, and it returns them."""
        read = self.needs_logprobs or number % self.mismatch_every_n_rollouts == 0
        read = read or any(callback.reads_logprobs(number) for callback in self.corrections.callbacks)
        return read and self.engine.capabilities.returns_logprobs

    def _sample_now(self, prompts: Sequence[Prompt], number: int, *, logprobs: bool | None = None) -> Sampled:
        """Sample one round of a rollout; raise on every rank if the engine fails on one."""
        logprobs = self.reads_logprobs(number) if logprobs is None else logprobs
        with failing_together("generation", EngineError):
            return self.sample(self.open(prompts, number), logprobs=logprobs, starts_rewards=True)

    def _sample_later(self, prompts: Sequence[Prompt], number: int) -> Callable[[], Sampled]:
        """Return a function that samples the first round of a rollout in a thread."""
        wanted, logprobs = self.open(prompts, number), self.reads_logprobs(number)
        there = replace(self, forward_context=self.ahead.context(self.forward_context, self.device))
        return partial(there.sample, wanted, logprobs=logprobs, starts_rewards=True)

    def sample(self, opened: Sequence[Trajectory], *, logprobs: bool = False, starts_rewards: bool = False) -> Sampled:
        """Sample trajectories: one completion each, or a conversation with an environment.

        Thread-safe: no collective, and no user code but that of environments.

        Args:
            opened: Trajectories without segments.
            logprobs: True to ask the engine for log-probabilities.
            starts_rewards: True to start rewards that run in subprocesses.

        Raises:
            ValueError: If a prompt has a placeholder of a picture, but no picture.
        """
        tokenizer, processor = self.tokenizer, processor_of(self.tokenizer)
        if processor is not None:
            for request in (each.request for each in opened if each.request.media is None):
                processor.check_ids(request.prefix_ids, f"the request of sample {request.sample_id}")
        text = None if tokenizer is None else lambda token_ids: str(tokenizer.decode(list(token_ids)))
        answers = Answers(self.engine, logprobs=logprobs, vocabulary=self.vocabulary, text=text)
        with Span("sample"), self.forward_context():  # also without samples, because ranks may share an engine
            if self.environments is None:
                requests = [each.request for each in opened]
                completions = complete(self.engine, requests, answers, self.model)
                pairs = list(zip(requests, completions, strict=True))
                made = [each.extend(PROMPT, (), answer) for each, answer in zip(opened, completions, strict=True)]
            else:
                conversations = [self.environments.open(each, self.model) for each in opened]
                drive = partial(converse, conversations, self.engine, logprobs=logprobs, answers=answers)
                if (workers := self.environments.workers) is None:
                    made = drive()
                else:
                    with workers.executor() as executor:
                        made = drive(executor=executor, limit=workers.workers)
                pairs = [pair for each in conversations for pair in each.pairs]
        sampled = Sampled(made, logprobs, pairs)
        if not (starts_rewards and self.rewards.starts_early):
            return sampled
        samples = sampled.select(baseline=False)
        return sampled._replace(started=self.rewards.start(**reward_arguments(samples, self.texts)))

    def reward(
        self, sampled: Sampled, rewards: Rewards | None = None
    ) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        """Return samples with rewards, the reward calls, and a mask of rows with failed rewards.

        Args:
            sampled: Samples; those of the baseline give each row its greedy score.
            rewards: Other rewards than those of the rollouts, for an evaluation; it has no baseline.
        """
        rollout, calls, failed = self._score(sampled, rewards or self.rewards, baseline=False)
        if self.greedy_baseline and rewards is None:
            greedy, further, _ = self._score(sampled, self.rewards, baseline=True)
            rollout, calls = with_baseline(rollout, greedy, self.corrections), [*calls, *further]
        return self.collectives.share(rollout), calls, failed

    def _score(
        self, sampled: Sampled, rewards: Rewards, *, baseline: bool
    ) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        samples = sampled.select(baseline=baseline)
        calls = rewards(
            **reward_arguments(samples, self.texts),
            dtype=self.dtype,
            trainer_state=self.trainer_state,
            started={} if baseline else sampled.started,
        )
        calls = without_failed_conversations(calls, samples)
        turns = self.environments is not None
        options = {"logprobs": sampled.logprobs, "turns": turns, "roles": turns and self.needs_roles}
        rows = lay_out(samples, self.engine, dtype=self.dtype, **options)
        return rewards.fill(rows, calls), calls, rewards.failed_rows(calls, len(rows))

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode completions for the rewards in one call; empty texts without a tokenizer."""
        if self.tokenizer is None or not rows:
            return [""] * len(rows)
        return decode_completions(self.tokenizer, rows, self.sampling.eos_token_ids or ())


def complete(engine: Engine, requests: Sequence[Request], answers: Answers, model: str = "") -> list[Completion]:
    """Return a validated completion for each request; ``model`` is the name of the policy in spans."""
    answers.ask(requests)
    spans = [chat_span(request, model) for request in requests]
    completions = engine.generate(list(requests), logprobs=answers.logprobs)
    checked = [answers.check(*pair) for pair in zip(requests, completions, strict=True)]
    for span, completion in zip(spans, checked, strict=True):
        end_chat(span, completion)
    answers.close()
    return checked


def reward_arguments(
    samples: Sequence[Trajectory], texts: Callable[[Sequence[Sequence[int]]], list[str]]
) -> dict[str, Any]:
    """Return the arguments of the reward functions; ``texts`` decodes the answers."""
    prompts, ids = [each.prompt for each in samples], [list(each.answer) for each in samples]
    keys = sorted({key for prompt in prompts for key in (*prompt.data_columns, *prompt.columns)})
    columns = {key: [prompt.columns.get(key) for prompt in prompts] for key in keys}
    return {
        "prompts": [prompt.content for prompt in prompts],
        "completions": [each.completion(text) for each, text in zip(samples, texts(ids), strict=True)],
        "completion_ids": ids,
        "columns": columns | reward_columns(samples),
    }


def lay_out(
    samples: Sequence[Trajectory], engine: Engine, *, dtype: torch.dtype, logprobs: bool, turns: bool, roles: bool
) -> Rollout:
    """Return the rows of samples, with their sampling masks checked."""
    rows = Rollout.of(samples, dtype=dtype, recorded=engine.extras, logprobs=logprobs, turns=turns, roles=roles)
    masks = rows.token_extras.get(SAMPLING_MASK)
    if masks is not None and not (holds(masks, rows.response_ids) | ~rows.action_mask).all():
        name = type(engine).__name__
        raise ValueError(f"expected the sampling mask of {name} to keep every sampled token, got one that is masked")
    return rows


def with_baseline(rollout: Rollout, greedy: Rollout, corrections: Corrections) -> Rollout:
    """Add the score of its prompt's greedy completion to each row."""
    size = len(rollout) // max(len(greedy), 1)
    rewarded = greedy.rewarded & corrections.reward_mask(greedy)
    score = corrections.scores(greedy.replace(rewarded=rewarded)).repeat_interleave(size)
    rewarded = rollout.rewarded & rewarded.repeat_interleave(size)
    return rollout.replace(rewarded=rewarded, extras={**rollout.extras, GREEDY_SCORE: score})


def without_failed_conversations(calls: Sequence[RewardCall], samples: Sequence[Trajectory]) -> list[RewardCall]:
    """Return calls that have neither values nor failures on the conversations that failed with their environment."""
    broken = {row for row, each in enumerate(samples) if each.failure is not None}
    if not broken:
        return [*calls]
    kept = [
        [replace(one, rows=rows) for one in call.failures if (rows := tuple(r for r in one.rows if r not in broken))]
        for call in calls
    ]
    return [
        call._replace(values=[None if row in broken else v for row, v in enumerate(call.values)], failures=failures)
        for call, failures in zip(calls, kept, strict=True)
    ]


def logged_metrics(calls: Sequence[RewardCall], conversations: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return the metrics that rewards and environments logged."""
    logged: dict[str, list[float]] = {}
    for call in calls:
        for key, values in call.metrics.items():
            logged.setdefault(f"reward_metric/{call.name}/{key}", []).extend(values)
    return logged | (metrics_of(conversations) if conversations else {})


def distribute_prompts(prompts: Sequence[Prompt], wanted: Sequence[int]) -> list[list[Prompt]]:
    """Distribute prompts to the ranks round-robin until each has enough; ``[rank::world]`` if all want equally many.

    Raises:
        RepeatedPromptError: If two prompts have one index, by which their samples would be the same.
    """
    twice = [index for index, number in Counter(prompt.index for prompt in prompts).items() if number > 1]
    if twice:
        raise RepeatedPromptError(
            f"expected different prompts from take of the data module, got index {twice[0]} twice: give a "
            "repeated prompt another index"
        )
    dealt: list[list[Prompt]] = [[] for _ in wanted]
    rank = 0
    for prompt in prompts:
        while len(dealt[rank]) >= wanted[rank]:
            rank = (rank + 1) % len(wanted)
        dealt[rank].append(prompt)
        rank = (rank + 1) % len(wanted)
    return dealt
