"""Sampler: prompts to completions to rewards, in rounds until enough groups are kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import ALONE, Collectives, failing_together
from lightning_rl.environments import converse
from lightning_rl.environments.outcome import metrics_of, reward_columns
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Completion, Engine, EngineError, Request, SamplingParams
from lightning_rl.generation.validate_completions import Answers
from lightning_rl.policy.sampling_mask import holds
from lightning_rl.rewards import RewardCall, Rewards
from lightning_rl.rewards.constant_calls import describe_constant_calls
from lightning_rl.rewards.correctness import deciding_scores
from lightning_rl.rewards.submitted import Submitted
from lightning_rl.rollout import GREEDY_SCORE, SAMPLING_MASK, FinishReason, Rollout, concatenate
from lightning_rl.rollouts.failures import FailureReport, check_failures
from lightning_rl.samples import PROMPT, Trajectory
from lightning_rl.samples.seeds import GREEDY, request_seed, sample_id
from lightning_rl.samples.trajectory_state import state_of_trajectories, trajectories_of_state
from lightning_rl.signal.masked import group_index
from lightning_rl.utils.decoding import decode_completions


class Sampled(NamedTuple):
    """Samples of one call to an engine.

    Attributes:
        trajectories: Samples in the order of the prompts, equally many for each; those of the baseline last.
        logprobs: True if they have the engine's log-probabilities.
        pairs: Requests as the engine got them with their completions; empty after a load from a checkpoint.
        started: Reward calls on the samples that are running.
    """

    trajectories: Sequence[Trajectory]
    logprobs: bool = False
    pairs: Sequence[tuple[Request, Completion]] = ()
    started: Mapping[str, Submitted] = MappingProxyType({})

    def state(self) -> dict[str, Any]:
        """Return plain values and tensors that load under ``weights_only=True``, without the prompts."""
        return {"logprobs": self.logprobs, "trajectories": state_of_trajectories(self.trajectories)}

    @staticmethod
    def from_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> "Sampled":
        """Restore the samples of ``prompts`` from :meth:`state`."""
        return Sampled(trajectories_of_state(state["trajectories"], prompts), state["logprobs"])

    def select(self, *, baseline: bool) -> list[Trajectory]:
        """Return the samples of the baseline, or those that train."""
        return [each for each in self.trajectories if each.baseline is baseline]


class Collected(NamedTuple):
    """Whole groups with their rewards.

    Attributes:
        rollout: Rows of the groups.
        stats: Counts of sampled groups, filtered groups, aborted rows, and rows that rewards failed on.
        logged: Metrics that reward functions logged; their names may differ between rollouts.
        constant_calls: Text of :func:`describe_constant_calls`.
    """

    rollout: Rollout
    stats: dict[str, Stat]
    logged: dict[str, Stat]
    constant_calls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Sampler of scored completions.

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
        failed_folder: Folder for samples with failed rewards, next to that of failed environments; None to write none.
        trainer_state: Progress of the run, for rewards that take it.
        vocabulary: Vocabulary size of the policy; None if unknown.
        environments: Environments of the samples; None for single-turn completions.
        needs_logprobs: True if every rollout needs the engine's log-probabilities.
        mismatch_every_n_rollouts: Interval of the rollouts that have them for ``kl/rollout``.
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
    failed_folder: Path | None = None
    trainer_state: TrainerState | None = None
    vocabulary: int | None = None
    environments: Environments | None = None
    needs_logprobs: bool = False
    mismatch_every_n_rollouts: int = 1

    @property
    def max_rounds(self) -> int:
        """Maximum number of sampling rounds until enough groups are kept."""
        return max((callback.max_rounds for callback in self.corrections.contributors("keep_groups")), default=1)

    def fill_groups(
        self, take: Callable[[int], list[Prompt]], groups: int, number: int, *, rank: int = 0, first: Sampled
    ) -> Collected:
        """Return ``groups`` scored groups for this rank.

        Collectives run between the rounds, never within one.

        Args:
            take: Returns the next prompts, for further rounds.
            groups: Number of groups.
            number: Number of the rollout.
            rank: Rank of this process.
            first: Samples of the first round.

        Raises:
            RewardError: On every rank, if rewards fail on too many rows.
            RuntimeError: On the other ranks, if a correction or the arguments of a reward raise on one.
        """
        parts: list[Rollout] = []
        calls: list[RewardCall] = []
        conversations: list[Trajectory] = []
        report = FailureReport(self.rewards)
        sampled, missing, filtered, aborted, solved, unsolved = first, groups, 0, 0, 0, 0
        for round_number in range(self.max_rounds):
            wanted = self.collectives.objects(missing)
            if not sum(wanted):
                break
            if round_number:
                prompts = distribute_prompts(take(sum(wanted)), wanted)[rank]
                # all rounds have equal fields, also after a resume
                with failing_together("generation", EngineError):
                    sampled = self.generate(self.open(prompts, number), logprobs=first.logprobs)
            with self._failing_together("rewards and masks of them"):
                part, new, failing = self.score(sampled)
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
        logged = self._close(report, self._metrics_of(calls, conversations), number, rank)
        if missing:
            warnings.warn(f"{missing} groups are missing after {self.max_rounds} rounds of refilling", stacklevel=2)
        counts = {"groups/sampled": filtered + groups - missing, "groups/filtered": filtered}
        counts |= {"groups/solved": solved, "groups/unsolved": unsolved}
        counts |= {"engine/aborted": aborted, **report.stats()}
        stats = {name: stat.sum() for name, stat in Stat.numbers(counts).items()}
        weighted = [call for call in calls if self.rewards.weights[call.name]]
        return Collected(concatenate(parts), stats, logged, describe_constant_calls(weighted))

    def _failing_together(self, what: str) -> AbstractContextManager[object]:
        """Return a context in which all ranks fail if one does; no-op where ranks shard layers."""
        together = self.collectives.ranks > 1 and self.collectives.layers is None
        return failing_together(what) if together else nullcontext()

    def _metrics_of(self, calls: Sequence[RewardCall], conversations: Sequence[Trajectory]) -> dict[str, list[float]]:
        """Return the metrics that rewards and environments logged."""
        logged: dict[str, list[float]] = {}
        for call in calls:
            for key, values in call.metrics.items():
                logged.setdefault(f"reward_metric/{call.name}/{key}", []).extend(values)
        return logged | ({} if self.environments is None else metrics_of(conversations))

    def _close(
        self, report: FailureReport, logged: Mapping[str, Sequence[float]], number: int, rank: int
    ) -> dict[str, Stat]:
        """Report failures, end the run if there are too many, and return a metric for each name that a rank logged."""
        summary = report.write(self.failed_folder, f"rollout-{number}-rank-{rank}.jsonl")
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
        prompts, size = prompts if self.collectives.generates else [], group_size or self.group_size
        wanted = self._open(prompts, number, size, sampling or self.sampling)
        if self.greedy_baseline:
            greedy = self._open(prompts, number, 1, replace(self.sampling, temperature=0.0), first=GREEDY)
            wanted += [replace(each, baseline=True) for each in greedy]
        return wanted

    def reads_logprobs(self, number: int) -> bool:
        """Return True if anything reads the engine's log-probabilities in rollout ``number``, and it returns them."""
        read = self.needs_logprobs or number % self.mismatch_every_n_rollouts == 0
        read = read or any(callback.reads_logprobs(number) for callback in self.corrections.callbacks)
        return read and self.engine.capabilities.returns_logprobs

    def _open(
        self, prompts: Sequence[Prompt], number: int, size: int, sampling: SamplingParams, first: int = 0
    ) -> list[Trajectory]:
        ids = [
            (prompt, sample_id(prompt.index, place, size, first=first)) for prompt in prompts for place in range(size)
        ]
        return [
            Trajectory(
                prompt=prompt,
                request=Request(
                    prefix_ids=prompt.token_ids,
                    sample_id=each,
                    seed=request_seed(self.seed, number, each),
                    sampling=sampling,
                    rollout=number,
                ),
            )
            for prompt, each in ids
        ]

    def generate(self, wanted: Sequence[Trajectory], *, logprobs: bool) -> Sampled:
        """Generate and start rewards that run in subprocesses. Thread-safe: no collective and no other user code."""
        sampled = self.converse(wanted, logprobs=logprobs)
        if not self.rewards.starts_early:
            return sampled
        return sampled._replace(started=self.rewards.start(**self.reward_arguments(sampled.select(baseline=False))))

    def converse(self, wanted: Sequence[Trajectory], *, logprobs: bool = False) -> Sampled:
        """Sample trajectories: one completion each, or a conversation with an environment.

        Args:
            wanted: Trajectories without segments.
            logprobs: True to ask the engine for log-probabilities.
        """
        answers = Answers(
            self.engine,
            logprobs=logprobs,
            vocabulary=self.vocabulary,
            text=None if self.tokenizer is None else self._whole_text,
        )
        with self.forward_context():  # also without samples, because ranks may share an engine
            if self.environments is None:
                requests = [each.request for each in wanted]
                completions = self.draw(requests, answers)
                made = [each.extend(PROMPT, (), answer) for each, answer in zip(wanted, completions, strict=True)]
                return Sampled(made, logprobs, list(zip(requests, completions, strict=True)))
            conversations = [self.environments.open(each) for each in wanted]
            workers = self.environments.workers
            drive = partial(converse, conversations, self.engine, logprobs=logprobs, answers=answers)
            if workers is None:
                made = drive()
            else:
                with workers.executor() as executor:
                    made = drive(executor=executor, limit=workers.workers)
        return Sampled(made, logprobs, [pair for each in conversations for pair in each.pairs])

    def draw(self, requests: Sequence[Request], answers: Answers) -> list[Completion]:
        """Return a validated completion for each request."""
        answers.ask(requests)
        completions = self.engine.generate(list(requests), logprobs=answers.logprobs)
        checked = [answers.check(*pair) for pair in zip(requests, completions, strict=True)]
        answers.close()
        return checked

    def score(self, sampled: Sampled) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        """Return samples with rewards, the reward calls, and a mask of rows with failed rewards.

        Greedy completions give each row its baseline.
        """
        rollout, calls, failed = self._with_rewards(sampled, baseline=False)
        if self.greedy_baseline:
            greedy, further, _ = self._with_rewards(sampled, baseline=True)
            rollout, calls = self._with_baseline(rollout, greedy), [*calls, *further]
        return self.collectives.share(rollout), calls, failed

    def texts(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Decode completions for the rewards in one call."""
        if self.tokenizer is None or not rows:
            return [""] * len(rows)
        return decode_completions(self.tokenizer, rows, self.sampling.eos_token_ids or ())

    def _whole_text(self, token_ids: Sequence[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(token_ids)))

    def _with_baseline(self, rollout: Rollout, greedy: Rollout) -> Rollout:
        size = len(rollout) // max(len(greedy), 1)
        rewarded = greedy.rewarded & self.corrections.reward_mask(greedy)
        score = self.corrections.scores(greedy.replace(rewarded=rewarded)).repeat_interleave(size)
        rewarded = rollout.rewarded & rewarded.repeat_interleave(size)
        return rollout.replace(rewarded=rewarded, extras={**rollout.extras, GREEDY_SCORE: score})

    def reward_arguments(self, samples: Sequence[Trajectory]) -> dict[str, Any]:
        """Return the arguments of the reward functions."""
        prompts, ids = [each.prompt for each in samples], [list(each.answer) for each in samples]
        keys = sorted({key for prompt in prompts for key in (*prompt.data_columns, *prompt.columns)})
        columns = {key: [prompt.columns.get(key) for prompt in prompts] for key in keys}
        return {
            "prompts": [prompt.content for prompt in prompts],
            "completions": [each.completion(text) for each, text in zip(samples, self.texts(ids), strict=True)],
            "completion_ids": ids,
            "columns": columns | reward_columns(samples),
        }

    def _with_rewards(
        self, sampled: Sampled, *, baseline: bool
    ) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        samples = sampled.select(baseline=baseline)
        calls = self.rewards(
            **self.reward_arguments(samples),
            dtype=self.dtype,
            trainer_state=self.trainer_state,
            started={} if baseline else sampled.started,
        )
        rows = self._lay_out(samples, logprobs=sampled.logprobs)
        return self.rewards.fill(rows, calls), calls, self.rewards.failed_rows(calls, len(rows))

    def _lay_out(self, samples: Sequence[Trajectory], *, logprobs: bool) -> Rollout:
        rows = Rollout.of(
            samples,
            dtype=self.dtype,
            recorded=self.engine.extras,
            logprobs=logprobs,
            turns=self.environments is not None,
        )
        masks = rows.token_extras.get(SAMPLING_MASK)
        if masks is not None and not (holds(masks, rows.response_ids) | ~rows.action_mask).all():
            name = type(self.engine).__name__
            raise ValueError(
                f"expected the sampling mask of {name} to keep every sampled token, got one that is masked"
            )
        return rows


def distribute_prompts(prompts: Sequence[Prompt], wanted: Sequence[int]) -> list[list[Prompt]]:
    """Distribute prompts to the ranks round-robin until each has enough; ``[rank::world]`` if all want equally many."""
    dealt: list[list[Prompt]] = [[] for _ in wanted]
    rank = 0
    for prompt in prompts:
        while len(dealt[rank]) >= wanted[rank]:
            rank = (rank + 1) % len(wanted)
        dealt[rank].append(prompt)
        rank = (rank + 1) % len(wanted)
    return dealt


def check_staleness(rollout: Rollout, number: int, max_staleness: int) -> None:
    """Check that no token of rollout ``number`` comes from weights that are too old.

    Raises:
        RuntimeError: With the sample, its version and the limit.
    """
    late = rollout.action_mask & (number - rollout.policy_version > max_staleness)
    if late.any():
        row, position = late.nonzero()[0].tolist()
        raise RuntimeError(
            f"expected tokens of rollout {number} from weights at most {max_staleness} rollouts old (max_staleness), "
            f"got version {int(rollout.policy_version[row, position])} at row {row} (sample "
            f"{int(rollout.sample_ids[row])}), response position {position}"
        )


def staleness(rollout: Rollout, number: int) -> dict[str, Stat]:
    """Return the age of each token's weights, in rollouts before rollout ``number``."""
    age = Stat.of(number - rollout.policy_version, rollout.valid_tokens)
    return {"staleness/mean": age, "staleness/max": age.maximum()}


def solve_counts(rollout: Rollout) -> tuple[int, int]:
    """Return the numbers of groups whose scores are all at least 1, and at most 0, by the function that decides."""
    (index, number), scores = group_index(rollout.groups), deciding_scores(rollout, None)

    def all_of(right: Tensor) -> int:
        parts = (right, ~right & ~scores.isnan())
        found, others = (torch.zeros(number).index_add_(0, index, part.float()) for part in parts)
        return int(((found > 0) & (others == 0)).sum())

    return all_of(scores >= 1), all_of(scores <= 0)
