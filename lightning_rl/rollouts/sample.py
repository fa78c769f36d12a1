"""Sample: prompts to completions to rewards, in rounds until enough groups are kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import ALONE, Collectives, failing_together
from lightning_rl.generation import Completion, Engine, EngineError, Request, Sampling, request_seed
from lightning_rl.generation.answers import Answers
from lightning_rl.policy.sampling_mask import holds
from lightning_rl.rewards import RewardCall, Rewards
from lightning_rl.rewards.failures import RewardSummary, check_failures, report_failures, was_cut_short
from lightning_rl.rewards.isolation import Submitted
from lightning_rl.rollout import GREEDY_SCORE, ROUTES, SAMPLING_MASK, Finish, Rollout, concatenate, pad_rows

GREEDY_IDS = 2**62  # far from the identity of any sample that trains


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequests:
    """What an engine is asked for at once.

    Args:
        prompts: of this rank.
        requests: for the samples that train, the same number for each prompt, in the order of the prompts.
        greedy: for a greedy answer to each prompt that never trains; None if nobody compares with it.
    """

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    greedy: Sequence[Request] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The answer to :class:`SampleRequests`: rows without rewards, which can wait, and be saved, like that.

    Args:
        prompts: of this rank.
        rows: the same number of rows for each prompt, in the order of the prompts.
        greedy: a row for each prompt, or None.
        pairs: each request with its completion; none for samples that come out of a checkpoint.
        started: calls of rewards for ``rows`` that are being made already.
    """

    prompts: Sequence[Prompt]
    rows: Rollout
    greedy: Rollout | None = None
    pairs: Sequence[tuple[Request, Completion]] = field(default=(), compare=False)
    started: Mapping[str, Submitted] = field(default_factory=dict, compare=False)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors that load under ``weights_only=True``, without the prompts."""
        return {"samples": self.rows.state(), "greedy": None if self.greedy is None else self.greedy.state()}

    @staticmethod
    def from_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> "Samples":
        """The inverse of :meth:`state`, with the prompts that were sampled."""
        greedy: Mapping[str, Tensor] | None = state["greedy"]
        return Samples(
            prompts=prompts,
            rows=Rollout.from_state(state["samples"]),
            greedy=None if greedy is None else Rollout.from_state(greedy),
        )


class ScoredGroups(NamedTuple):
    """Whole groups with their rewards.

    Attributes:
        rollout: the rows.
        stats: how many groups were sampled and filtered, rows that were aborted, and rows that rewards failed on.
        noted: what reward functions logged themselves, under names that may be others the next time.
    """

    rollout: Rollout
    stats: dict[str, Stat]
    noted: dict[str, Stat]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Everything that turns prompts into scored samples.

    Args:
        engine: generates.
        tokenizer: turns completions into text for the rewards; without one they get the token ids.
        rewards: scores.
        sampling: how tokens are drawn, with ids that end a response.
        group_size: samples of each prompt.
        seed: of the run.
        corrections: here reward masks, kept groups and who looks on.
        dtype: of rewards and log-probabilities.
        forward_context: context to generate in, for the precision of the forward.
        greedy_baseline: whether a greedy answer to each prompt is scored as well, for ``extras["greedy_score"]``.
        collectives: what the ranks do together.
        max_failed_rewards: the share of a rollout's rows that rewards have to fail on to end the run; None for never.
        failed_folder: where the samples go that rewards fail on; None for no files.
        trainer_state: how far the run is, for rewards that ask.
        vocabulary: number of token ids that the policy knows; None if unknown.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    rewards: Rewards
    sampling: Sampling
    group_size: int
    seed: int
    corrections: Corrections = field(default_factory=Corrections)
    dtype: torch.dtype = torch.float32
    forward_context: Callable[[], AbstractContextManager[object]] = nullcontext
    greedy_baseline: bool = False
    collectives: Collectives = ALONE
    max_failed_rewards: float | None = 1.0
    failed_folder: Path | None = None
    trainer_state: TrainerState | None = None
    vocabulary: int | None = None

    @property
    def max_rounds(self) -> int:
        """How often prompts are sampled at most until enough groups are kept."""
        return max((callback.max_rounds for callback in self.corrections.contributors("keep_groups")), default=1)

    def fill_groups(
        self, take: Callable[[int], list[Prompt]], groups: int, number: int, *, rank: int = 0, first: Samples
    ) -> ScoredGroups:
        """``groups`` groups for this rank, scored.

        Ranks agree between the rounds; within one there is no collective.

        Args:
            take: the next prompts, for further rounds.
            groups: how many.
            number: of the rollout.
            rank: this one.
            first: the first round.

        Raises:
            RewardError: on every rank, if rewards fail on too many rows.
        """
        parts: list[Rollout] = []
        calls: list[RewardCall] = []
        failed: list[Tensor] = []
        samples, missing, filtered, aborted = first, groups, 0, 0
        for round_number in range(self.max_rounds):
            wanted = self.collectives.objects(missing)
            if not sum(wanted):
                break
            if round_number:
                prompts = deal(take(sum(wanted)), wanted)[rank]
                samples = self.generate_together(self.requests(prompts, number))
            self.corrections.observe_generated(samples.pairs)
            part, new, failing = self.score(samples)
            calls, failed = [*calls, *new], [*failed, failing]
            aborted += int((part.finish == Finish.ABORT).sum())
            self.corrections.observe_rewards(part, new)
            part = part.replace(rewarded=part.rewarded & self.corrections.reward_mask(part))
            keep = self.corrections.keep_groups(part)
            parts.append(part.select(keep))
            kept = int(keep.sum()) // self.group_size
            filtered += len(part) // self.group_size - kept
            missing -= kept
        noted = self._close_rewards(calls, torch.cat(failed), number, rank)
        if missing:
            warnings.warn(f"{missing} groups are missing after {self.max_rounds} rounds of refilling", stacklevel=2)
        counts = {"groups/sampled": filtered + groups - missing, "groups/filtered": filtered}
        counts |= {"rollout/aborted": aborted, **self._count_failures(calls, torch.cat(failed))}
        stats = {name: Stat.single(count).sum() for name, count in counts.items()}
        return ScoredGroups(concatenate(parts), stats, noted)

    def _count_failures(self, calls: Sequence[RewardCall], failed: Tensor) -> dict[str, int]:
        counts = {"reward/failed": int(failed.sum()), **{f"reward/{name}/failed": 0 for name in self.rewards.functions}}
        for call in calls:
            counts[f"reward/{call.name}/failed"] += sum(len(failure.rows) for failure in call.failures)
        return counts

    def _close_rewards(self, calls: Sequence[RewardCall], failed: Tensor, number: int, rank: int) -> dict[str, Stat]:
        """Reports what rewards failed on in a rollout, ends the run if it is too much, and collects what they noted."""
        name = f"rollout-{number}-rank-{rank}.jsonl"
        path = None if self.failed_folder is None else self.failed_folder / name
        cause = report_failures(calls, path)
        noted: dict[str, list[float]] = {}
        for call in calls:
            for key, values in call.metrics.items():
                noted.setdefault(f"reward/{call.name}/{key}", []).extend(values)
        summary = RewardSummary(
            rows=len(failed),
            failed=int(failed.sum()),
            cause=cause,
            path=str(path) if cause and path is not None else "",
            stopped_by=was_cut_short(calls),
            metrics=tuple(noted),
        )
        summaries = self.collectives.objects(self.collectives.share(summary))
        check_failures(summaries, number, self.max_failed_rewards)
        names = sorted({name for summary in summaries for name in summary.metrics})
        return {name: Stat.of(torch.tensor(noted.get(name, []), dtype=torch.float64)) for name in names}

    def sample(
        self, prompts: Sequence[Prompt], *, group_size: int | None = None, sampling: Sampling | None = None
    ) -> Rollout:
        """Generates and scores samples that do not train, one of each prompt by default, from the run's seed."""
        requests = self.requests(prompts, 0, group_size=group_size or 1, sampling=sampling, baseline=False)
        rollout, calls, _ = self.score(self.generate_together(requests))
        report_failures(calls, None)
        return rollout

    def requests(
        self,
        prompts: Sequence[Prompt],
        number: int,
        *,
        group_size: int | None = None,
        sampling: Sampling | None = None,
        baseline: bool | None = None,
    ) -> SampleRequests:
        """What the engine is asked for, for ``group_size`` samples of each prompt in rollout ``number``."""
        prompts, size = prompts if self.collectives.generates else [], group_size or self.group_size
        requests = self._requests(prompts, number, size, sampling or self.sampling)
        if not (self.greedy_baseline if baseline is None else baseline):
            return SampleRequests(prompts=prompts, requests=requests)
        greedy = replace(self.sampling, temperature=0.0)
        baselines = self._requests(prompts, number, 1, greedy, first_id=GREEDY_IDS)
        return SampleRequests(prompts=prompts, requests=requests, greedy=baselines)

    def _requests(
        self, prompts: Sequence[Prompt], number: int, size: int, sampling: Sampling, first_id: int = 0
    ) -> list[Request]:
        ids = [(prompt, first_id + prompt.index * size + place) for prompt in prompts for place in range(size)]
        return [
            Request(
                prefix_ids=prompt.token_ids,
                sample_id=sample_id,
                seed=request_seed(self.seed, number, sample_id),
                sampling=sampling,
            )
            for prompt, sample_id in ids
        ]

    def generate_together(self, requests: SampleRequests) -> Samples:
        """Generates, and begins the rewards that run in processes of their own; if one rank fails, all do."""
        return self._begin_rewards(self.generate_parts([requests])[0])

    def generate_parts(self, parts: Sequence[SampleRequests]) -> list[Samples]:
        """Generates for several askers in one call of the engine; if one rank fails, all do."""
        asked = [[*part.requests, *(part.greedy or ())] for part in parts]
        with failing_together("generation", EngineError):
            completions = iter(self.converse(list(chain.from_iterable(asked))))
            return [
                self._samples(part, requests, list(islice(completions, len(requests))))
                for part, requests in zip(parts, asked, strict=True)
            ]

    def generate(self, requests: SampleRequests) -> Samples:
        """Generates, and begins the rewards that run in processes of their own.

        Runs no other code of rewards, none of corrections, and has no collective, so any thread may do it.
        """
        asked = [*requests.requests, *(requests.greedy or ())]
        return self._begin_rewards(self._samples(requests, asked, self.converse(asked)))

    def _samples(
        self, requests: SampleRequests, asked: Sequence[Request], completions: Sequence[Completion]
    ) -> Samples:
        size = len(requests.requests)
        rows = self._rollout(_repeat(requests.prompts, size), asked[:size], completions[:size])
        greedy = None
        if requests.greedy is not None:
            greedy = self._rollout(requests.prompts, requests.greedy, completions[size:])
        pairs = list(zip(asked, completions, strict=True))
        return Samples(prompts=requests.prompts, rows=rows, greedy=greedy, pairs=pairs)

    def _begin_rewards(self, samples: Samples) -> Samples:
        arguments = self._reward_arguments(_repeat(samples.prompts, len(samples.rows)), samples.rows)
        return replace(samples, started=self.rewards.start(**arguments))

    def converse(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion for each request, held against it: every answer of every engine comes by here.

        The answer is the whole response: conversations have one turn. One of several goes on in :meth:`generate`, with
        requests of ``turn + 1`` whose prefix is the one before, what was drawn and what came back; the tokens that
        nobody drew are holes, which ``Rollout.of_samples(actions=)`` takes.
        """
        logprobs = self.engine.capabilities.returns_logprobs
        answers = Answers(
            engine=self.engine,
            requests=tuple(requests),
            logprobs=logprobs,
            vocabulary=self.vocabulary,
            text=None if self.tokenizer is None else self._whole_text,
        )
        with self.forward_context():  # for no requests as well: ranks may share an engine
            return answers.check(self.engine.generate(list(requests), logprobs=logprobs))

    def score(self, samples: Samples) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        """Samples with their rewards, the calls that gave them, and the rows that rewards failed on; greedy answers
        give each row its baseline.
        """
        rollout, calls, failed = self._with_rewards(
            _repeat(samples.prompts, len(samples.rows)), samples.rows, samples.started
        )
        if samples.greedy is not None:
            greedy, further, _ = self._with_rewards(samples.prompts, samples.greedy)
            rollout, calls = self._with_baseline(rollout, greedy), [*calls, *further]
        return self.collectives.share(rollout), calls, failed

    def text(self, token_ids: Sequence[int]) -> str:
        """A completion as the rewards see it."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _whole_text(self, token_ids: Sequence[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(token_ids)))

    def _with_baseline(self, rollout: Rollout, greedy: Rollout) -> Rollout:
        size = len(rollout) // max(len(greedy), 1)
        rewarded = greedy.rewarded & self.corrections.reward_mask(greedy)
        score = torch.where(rewarded, greedy.rewards, 0.0)
        bonus = self.corrections.reward_bonus(greedy)
        score = (score if bonus is None else (score.double() + bonus).to(score.dtype)).repeat_interleave(size)
        rewarded = rollout.rewarded & rewarded.repeat_interleave(size)
        return rollout.replace(rewarded=rewarded, extras={**rollout.extras, GREEDY_SCORE: score})

    def _reward_arguments(self, prompts: Sequence[Prompt], rollout: Rollout) -> dict[str, Any]:
        """What the reward functions are given."""
        lengths = rollout.response_lengths.tolist()
        ids = [row[:length] for row, length in zip(rollout.response_ids.tolist(), lengths, strict=True)]
        keys = sorted({key for prompt in prompts for key in prompt.columns})
        return {
            "prompts": [prompt.content for prompt in prompts],
            "completions": [self.text(row) for row in ids],
            "completion_ids": ids,
            "columns": {key: [prompt.columns.get(key) for prompt in prompts] for key in keys},
        }

    def _with_rewards(
        self, prompts: Sequence[Prompt], rollout: Rollout, started: Mapping[str, Submitted] | None = None
    ) -> tuple[Rollout, list[RewardCall], Bool[Tensor, " B"]]:
        scores = self.rewards(
            **self._reward_arguments(prompts, rollout),
            dtype=self.dtype,
            trainer_state=self.trainer_state,
            started=started,
        )
        rewarded = scores.scored & rollout.trained
        scored = rollout.replace(rewards=scores.total, task_rewards=scores.raw, rewarded=rewarded)
        return scored, list(scores.calls), scores.failed

    def _rollout(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Completion]
    ) -> Rollout:
        rollout = Rollout.of_samples(
            [request.prefix_ids for request in requests],
            [completion.token_ids for completion in completions],
            groups=[prompt.index for prompt in prompts],
            sample_ids=[request.sample_id for request in requests],
            finish=[completion.finish for completion in completions],
            versions=[c.versions or (c.version,) * len(c.token_ids) for c in completions],
            dtype=self.dtype,
        )
        recorded = self.engine.extras
        extras = _pad_extras([c.token_extras for c in completions], rollout.response_lengths, recorded)
        masks = extras.get(SAMPLING_MASK)
        if masks is not None and not (holds(masks, rollout.response_ids) | ~rollout.action_mask).all():
            raise ValueError(
                f"expected {type(self.engine).__name__} to keep every token that it draws, got one it did not"
            )
        return rollout.replace(
            rollout_logprobs=self._logprobs(completions) if self.engine.capabilities.returns_logprobs else None,
            token_extras=extras,
            prompt_extras=_pad_extras(
                [c.prompt_extras for c in completions], rollout.prompt_lengths, recorded & {ROUTES}
            ),
        )

    def _logprobs(self, completions: Sequence[Completion]) -> Tensor:
        rows = [completion.logprobs for completion in completions]
        return pad_rows([row for row in rows if row is not None], self.dtype)[0]


def deal(prompts: Sequence[Prompt], wanted: Sequence[int]) -> list[list[Prompt]]:
    """Deals prompts out to the ranks in turn, each until it has enough: ``[rank::world]`` if all want the same."""
    hands: list[list[Prompt]] = [[] for _ in wanted]
    rank = 0
    for prompt in prompts:
        while len(hands[rank]) >= wanted[rank]:
            rank = (rank + 1) % len(wanted)
        hands[rank].append(prompt)
        rank = (rank + 1) % len(wanted)
    return hands


def check_staleness(rollout: Rollout, number: int, max_staleness: int) -> None:
    """Refuses tokens of weights that are too old for rollout ``number``.

    Raises:
        RuntimeError: naming sample, version and bound.
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
    """How many rollouts before rollout ``number`` the weights were synced that drew each token."""
    age = Stat.of(number - rollout.policy_version, rollout.valid_tokens)
    return {"staleness/mean": age, "staleness/max": age.maximum()}


def _repeat(prompts: Sequence[Prompt], rows: int) -> list[Prompt]:
    """The prompt of each of so many rows, the same number for each prompt."""
    return [prompt for prompt in prompts for _ in range(rows // len(prompts))]


def _pad_extras(rows: list[Mapping[str, Tensor]], lengths: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
    """What the engine recorded, each name padded with 0 to the longest row."""
    padded: dict[str, Tensor] = {}
    for name in sorted(names):
        for extras, length in zip(rows, lengths.tolist(), strict=True):
            if name not in extras or len(extras[name]) != length:
                got = "nothing" if name not in extras else len(extras[name])
                raise ValueError(f"expected {name} of each of {length} tokens from the engine, got {got}")
        padded[name], _ = pad_rows([extras[name] for extras in rows], rows[0][name].dtype if rows else torch.uint8)
    return padded
