"""Draw: prompts to completions to rewards, in rounds until enough groups are kept."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightning_rl.corrections import Contributions, Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import draws, failing_together, from_drawing, global_objects
from lightning_rl.generation import Completion, Engine, EngineError, Request, Sampling, request_seed
from lightning_rl.policy.sampling_mask import holds
from lightning_rl.rewards import Rewards
from lightning_rl.rollout import GREEDY_SCORE, KEPT, ROUTES, Finish, Rollout, concatenate
from lightning_rl.rollouts.samples import Order, Sampled

GREEDY_IDS = 2**62  # far from the identity of any sample that trains
UNFILTERED = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawer:
    """Everything that turns prompts into scored samples.

    Args:
        engine: generates.
        tokenizer: turns completions into text for the rewards; without one they get the token ids.
        rewards: scores.
        contributions: the corrections; here reward masks and kept groups.
        group_size: samples of each prompt.
        temperature: of the sampling.
        max_new_tokens: most tokens of a response.
        eos_ids: ids that end a response.
        stop: strings that end a response.
        seed: of the run.
        logprobs: whether the engine's log-probabilities are kept.
        dtype: of rewards and log-probabilities.
        generating: context to generate in, for the precision of the forward.
        greedy_baseline: whether a greedy answer to each prompt is scored as well, for ``extras["greedy_score"]``.
        keep: top-k, top-p and min-p of the sampling.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase | None
    rewards: Rewards
    contributions: Contributions
    group_size: int
    temperature: float
    max_new_tokens: int
    eos_ids: frozenset[int]
    stop: tuple[str, ...]
    seed: int
    logprobs: bool
    dtype: torch.dtype
    generating: Callable[[], AbstractContextManager[object]]
    greedy_baseline: bool = False
    keep: Sampling = UNFILTERED

    def draw(
        self,
        take: Callable[[int], list[Prompt]],
        number: int,
        *,
        cycle: int,
        rank: int,
        first: Sampled | Sequence[Prompt] | None = None,
    ) -> tuple[Rollout, dict[str, Stat]]:
        """``number`` groups for this rank. Ranks agree between the rounds; within one there is no collective.

        Args:
            take: the next prompts.
            number: how many groups.
            cycle: number of the rollout.
            rank: this one.
            first: the first round, if its prompts were taken or even sampled before.
        """
        kept: list[Rollout] = []
        missing, filtered = number, 0
        rounds = max((filtering.most_rounds for filtering in self.contributions.offering("keep_groups")), default=1)
        for _ in range(rounds):
            wanted = global_objects(missing)
            if not sum(wanted):
                break
            if isinstance(first, Sampled):
                part = self.scored(first)
            else:
                prompts = dealt(take(sum(wanted)), wanted)[rank] if first is None else first
                part = self.sample(prompts, cycle, greedy_baseline=self.greedy_baseline)
            first = None
            self.contributions.observe_drawn(part)
            part = part.replace(rewarded=part.rewarded & self.contributions.reward_mask(part))
            keep = _whole_groups(part, self.contributions.keep_groups(part))
            kept.append(part.select(keep))
            found = int(keep.sum()) // self.group_size
            filtered += len(part) // self.group_size - found
            missing -= found
        if missing:
            warnings.warn(f"{missing} groups are missing after {rounds} rounds of refilling", stacklevel=2)
        counts = {"groups/sampled": filtered + number - missing, "groups/filtered": filtered}
        return concatenate(kept), {name: Stat.single(count).sum() for name, count in counts.items()}

    def sample(
        self,
        prompts: Sequence[Prompt],
        cycle: int,
        *,
        group_size: int | None = None,
        temperature: float | None = None,
        greedy_baseline: bool = False,
    ) -> Rollout:
        """Generates and scores ``group_size`` samples of each prompt, and a greedy answer that never trains."""
        order = self.order(
            prompts, cycle, group_size=group_size, temperature=temperature, greedy_baseline=greedy_baseline
        )
        with failing_together("generation", EngineError):
            sampled = self.sampled(order)
        return self.scored(sampled)

    def order(
        self,
        prompts: Sequence[Prompt],
        cycle: int,
        *,
        group_size: int | None = None,
        temperature: float | None = None,
        greedy_baseline: bool = False,
    ) -> Order:
        """What :meth:`sample` asks the engine for."""
        size = self.group_size if group_size is None else group_size
        prompts = prompts if draws() else []
        requests = self.requests(prompts, cycle, size, temperature)
        greedy = self.requests(prompts, cycle, 1, 0.0, first_id=GREEDY_IDS) if greedy_baseline else None
        return Order(prompts=prompts, requests=requests, greedy=greedy)

    def sampled(self, order: Order) -> Sampled:
        """Generates. Runs no code of rewards or corrections and has no collective, so any thread may do it."""
        completions, number = self.completed([*order.requests, *(order.greedy or ())]), len(order.requests)
        samples = self._rollout(_each(order.prompts, number), order.requests, completions)
        if order.greedy is None:
            return Sampled(prompts=order.prompts, samples=samples)
        greedy = self._rollout(order.prompts, order.greedy, completions[number:])
        return Sampled(prompts=order.prompts, samples=samples, greedy=greedy)

    def scored(self, sampled: Sampled) -> Rollout:
        """Samples with their rewards, and with the score of the greedy answers that came with them."""
        rollout = self._rewarded(_each(sampled.prompts, len(sampled.samples)), sampled.samples)
        if sampled.greedy is not None:
            rollout = self._with_baseline(rollout, self._rewarded(sampled.prompts, sampled.greedy))
        return from_drawing(rollout)

    def requests(
        self,
        prompts: Sequence[Prompt],
        cycle: int,
        group_size: int,
        temperature: float | None = None,
        *,
        first_id: int = 0,
    ) -> list[Request]:
        """Requests for ``group_size`` samples of each prompt."""
        sampling = replace(
            self.keep,
            temperature=self.temperature if temperature is None else temperature,
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            eos_token_ids=tuple(self.eos_ids),
        )
        return [
            Request(
                prefix_ids=prompt.token_ids,
                sample_id=first_id + prompt.index * group_size + j,
                seed=request_seed(self.seed, cycle, first_id + prompt.index * group_size + j),
                sampling=sampling,
            )
            for prompt in prompts
            for j in range(group_size)
        ]

    def completed(self, requests: list[Request]) -> list[Completion]:
        """What the engine makes of requests."""
        with self.generating():
            return self.engine.generate(requests, logprobs=self.logprobs)  # for none as well: ranks may share an engine

    def text(self, token_ids: Sequence[int]) -> str:
        """A completion as the rewards see it."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _with_baseline(self, rollout: Rollout, greedy: Rollout) -> Rollout:
        size = len(rollout) // max(len(greedy), 1)
        rewarded = greedy.rewarded & self.contributions.reward_mask(greedy)
        score = torch.where(rewarded, greedy.rewards, 0.0)
        bonus = self.contributions.reward_bonus(greedy)
        score = (score if bonus is None else (score.double() + bonus).to(score.dtype)).repeat_interleave(size)
        known = rollout.rewarded & rewarded.repeat_interleave(size)
        return rollout.replace(rewarded=known, extras={**rollout.extras, GREEDY_SCORE: score})

    def _rewarded(self, prompts: Sequence[Prompt], rollout: Rollout) -> Rollout:
        lengths = rollout.response_lengths.tolist()
        ids = [row[:length] for row, length in zip(rollout.response_ids.tolist(), lengths, strict=True)]
        keys = sorted({key for prompt in prompts for key in prompt.columns})
        scores = self.rewards(
            [prompt.content for prompt in prompts],
            [self.text(row) for row in ids],
            completion_ids=ids,
            columns={key: [prompt.columns.get(key) for prompt in prompts] for key in keys},
            dtype=self.dtype,
        )
        return rollout.replace(rewards=scores.total, task_rewards=scores.raw, rewarded=scores.scored & rollout.trained)

    def _rollout(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], completions: Sequence[Completion]
    ) -> Rollout:
        completions = completions[: len(requests)]
        ids = [completion.token_ids for completion in completions]
        response, lengths = _padded([torch.tensor(row, dtype=torch.int64) for row in ids], torch.int64)
        prompt, prompt_lengths = _padded([torch.tensor(request.prefix_ids) for request in requests], torch.int64)
        actions = torch.arange(response.shape[1]) < lengths[:, None]
        token_extras = _recorded([c.token_extras for c in completions], lengths, self.engine.extras)
        prompt_extras = _recorded([c.prompt_extras for c in completions], prompt_lengths, self.engine.extras & {ROUTES})
        if KEPT in token_extras and not (holds(token_extras[KEPT], response) | ~actions).all():
            raise ValueError(
                f"expected {type(self.engine).__name__} to keep every token that it draws, got one it did not"
            )
        trained = torch.tensor([completion.finish != Finish.ABORT for completion in completions], dtype=torch.bool)
        return Rollout(
            prompt_ids=prompt,
            prompt_lengths=prompt_lengths,
            response_ids=response,
            response_lengths=lengths,
            action_mask=actions,
            valid_tokens=actions,
            groups=torch.tensor([row.index for row in prompts], dtype=torch.int64),
            sample_ids=torch.tensor([request.sample_id for request in requests], dtype=torch.int64),
            finish=torch.tensor([completion.finish for completion in completions], dtype=torch.uint8),
            policy_version=torch.where(actions, _versions(completions), -1),
            trained=trained,
            rewarded=torch.zeros_like(trained),
            rewards=torch.zeros(len(ids), dtype=self.dtype),
            rollout_logprobs=self._logprobs(completions) if self.logprobs else None,
            token_extras=token_extras,
            prompt_extras=prompt_extras,
        )

    def _logprobs(self, completions: Sequence[Completion]) -> Tensor:
        given = [completion.logprobs for completion in completions]
        for completion, row in zip(completions, given, strict=True):
            if row is None or len(row) != len(completion.token_ids):
                raise ValueError(
                    f"expected a log-probability for each of {len(completion.token_ids)} tokens from "
                    f"{type(self.engine).__name__}, got {'none' if row is None else len(row)}"
                )
        return _padded([row for row in given if row is not None], self.dtype)[0]


def _recorded(rows: list[Mapping[str, Tensor]], lengths: Tensor, names: frozenset[str]) -> dict[str, Tensor]:
    """What the engine recorded, each name padded with 0 to the longest row."""
    found: dict[str, Tensor] = {}
    for name in sorted(names):
        for extras, length in zip(rows, lengths.tolist(), strict=True):
            if name not in extras or len(extras[name]) != length:
                got = "nothing" if name not in extras else len(extras[name])
                raise ValueError(f"expected {name} of each of {length} tokens from the engine, got {got}")
        found[name], _ = _padded([extras[name] for extras in rows], rows[0][name].dtype if rows else torch.uint8)
    return found


def _each(prompts: Sequence[Prompt], rows: int) -> list[Prompt]:
    """The prompt of each of so many rows, the same number for each prompt."""
    return [prompt for prompt in prompts for _ in range(rows // len(prompts))]


def dealt(prompts: Sequence[Prompt], wanted: Sequence[int]) -> list[list[Prompt]]:
    """Deals prompts out to the ranks in turn, each until it has enough: ``[rank::world]`` if all want the same."""
    hands: list[list[Prompt]] = [[] for _ in wanted]
    rank = 0
    for prompt in prompts:
        while len(hands[rank]) >= wanted[rank]:
            rank = (rank + 1) % len(wanted)
        hands[rank].append(prompt)
        rank = (rank + 1) % len(wanted)
    return hands


def _whole_groups(rollout: Rollout, keep: Tensor) -> Tensor:
    dropped = rollout.groups[~keep].unique()
    partly = torch.isin(rollout.groups[keep], dropped)
    if partly.any():
        group = int(rollout.groups[keep][partly][0])
        raise ValueError(f"expected keep_groups to decide about whole groups, but it splits group {group}")
    return keep


def _versions(completions: Sequence[Completion]) -> Tensor:
    """Of the weights that drew each token [B, T]."""
    rows = [completion.versions or (completion.version,) * len(completion.token_ids) for completion in completions]
    return _padded([torch.tensor(row, dtype=torch.int64) for row in rows], torch.int64)[0]


def _padded(rows: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = max([1, *map(len, rows)])
    padded = torch.zeros(len(rows), width, *(rows[0].shape[1:] if rows else ()), dtype=dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded, torch.tensor([len(row) for row in rows], dtype=torch.int64)
