"""Trajectories: the segments of tokens of one sample, in the order in which they were made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lightning_rl.samples.completion import POLICY, Completion, FinishReason, Request
from lightning_rl.samples.failure import Failure
from lightning_rl.samples.media import Media, join_media
from lightning_rl.samples.prompt import REWRITTEN, Message, Prompt

PROMPT = -1
"""Parent of the segments that follow the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens that the policy sampled, or read, in one piece: 12 ids, sampled, 12 log-probabilities, version 7.

    Args:
        token_ids: Token ids; sampled ones with EOS.
        parent: Index of the segment that it follows, :data:`PROMPT` for the prompt, or None for a new context, which
            follows nothing.
        sampled: True if the policy sampled the tokens.
        logprobs: Log-probability of each sampled token, float32; None if not requested.
        versions: Version of the weights, one for all tokens or one per token; empty for tokens that were read.
        finish: Reason for the end of sampled tokens.
        reward: Reward of the turn that the segment ends, or None.
        extras: Further data of each token by name, [L, ...].
        media: Pictures among tokens that were read; None without.
        role: Role in which the policy sampled the tokens, such as "solver".
    """

    token_ids: tuple[int, ...]
    parent: int | None
    sampled: bool = False
    logprobs: Float[Tensor, " L"] | None = None
    versions: tuple[int, ...] = ()
    finish: FinishReason | None = None
    reward: float | None = None
    extras: Mapping[str, Shaped[Tensor, "L ..."]] = field(default_factory=dict)
    media: Media | None = None
    role: str = POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sample: sample 515 of prompt 64, three segments, finish STOP, environment reward 1.0.

    Args:
        prompt: Row of the data.
        request: Request of the first turn, whose prefix is the prompt of the row in a rollout.
        segments: Segments in the order in which they were made; empty for a sample that has not begun.
        finish: Reason for the end.
        messages: Messages of the conversation, if the environment uses them.
        opening: Number of messages before the first answer.
        metrics: Metrics of the environment, summed over turns.
        environment: Name of the environment in metrics; empty without one.
        environment_reward: Sum of the environment's rewards, or None.
        seconds: Seconds spent in the environment.
        failure: Failure of the environment, of the second try if there was one, or None.
        baseline: True for a greedy completion, to which the others of its prompt are compared.
        prompt_extras: Further data of each prompt token by name, [P, ...].

    Example:
        >>> from lightning_rl.samples import SamplingParams
        >>> prompt = Prompt(index=64, token_ids=(3, 4), content=[3, 4], columns={})
        >>> sampling = SamplingParams(eos_token_ids=[1])
        >>> wanted = Trajectory(
        ...     prompt=prompt, request=Request(prefix_ids=(3, 4), sample_id=515, seed=9, sampling=sampling)
        ... )
        >>> answer = Completion(token_ids=(5, 1), logprobs=None, finish=FinishReason.STOP, version=7)
        >>> sample = wanted.extend(PROMPT, (), answer).extend(0, (8, 9), answer)
        >>> [(segment.token_ids, segment.parent) for segment in sample.segments], sample.branches()
        ([((5, 1), -1), ((8, 9), 0), ((5, 1), 1)], [(0, 1, 2)])
    """

    prompt: Prompt
    request: Request
    segments: tuple[Segment, ...] = ()
    finish: FinishReason = FinishReason.STOP
    messages: tuple[Message, ...] = ()
    opening: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    environment: str = ""
    environment_reward: float | None = None
    seconds: float = 0.0
    failure: Failure | None = None
    baseline: bool = False
    prompt_extras: Mapping[str, Shaped[Tensor, "P ..."]] = field(default_factory=dict)

    def extend(
        self, parent: int | None, read: Sequence[int], completion: Completion, media: Media | None = None
    ) -> "Trajectory":
        """Return the trajectory with tokens that were read after segment ``parent``, and the completion of them.

        The completion's values of prompt tokens belong to the segments of its prefix: those of ``read`` to its segment,
        and that of the last token of ``parent``, if it became an input only now, to the end of that segment.

        Args:
            parent: Index of the last segment, :data:`PROMPT`, or None if ``read`` is a new context.
            read: Token ids of the environment; may be empty.
            completion: Completion of the prefix that ends with ``read``.
            media: Pictures among ``read``; None without.
        """
        segments, values = list(self.segments), completion.prompt_extras
        is_first = all(segment.parent != parent for segment in segments)
        if values and is_first and parent is not None and parent != PROMPT and segments[parent].token_ids:
            last, begins = segments[parent], {name: len(value) - len(read) for name, value in values.items()}
            ends = {name: values[name][begin - 1 : begin] for name, begin in begins.items() if name in last.extras}
            extras = {name: torch.cat([last.extras[name][:-1], end]) for name, end in ends.items()}
            segments[parent] = replace(last, extras={**last.extras, **extras})
        if read:
            later = {name: value[len(value) - len(read) :] for name, value in values.items()}
            segments.append(Segment(token_ids=tuple(read), parent=parent, extras=later, media=media))
            parent = len(segments) - 1
        answer = Segment(
            token_ids=completion.token_ids,
            parent=parent,
            sampled=True,
            logprobs=completion.logprobs,
            versions=completion.versions or (completion.version,),
            finish=completion.finish,
            extras=completion.token_extras,
        )
        return replace(
            self,
            segments=(*segments, answer),
            finish=completion.finish,
            prompt_extras=self.prompt_extras if self.segments else values,
        )

    def find(self, prefix: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
        """Return the segment that a prefix continues, and its ids after that segment, as for :meth:`extend`.

        It is the last segment of the longest path that the prefix begins with; None if the prefix begins with none, so
        that it is a new context. Among equal answers it is the newest that no other answer continues, if there is one.
        """
        prefix, begins = tuple(prefix), self.request.prefix_ids
        answers: dict[int | None, int | None] = {PROMPT: PROMPT, None: None}  # the last one of the path to a segment
        continued = set[int | None]()
        reached: dict[int, int] = {PROMPT: len(begins)} if prefix[: len(begins)] == begins else {}
        for place, segment in enumerate(self.segments):
            answers[place] = place if segment.sampled else answers[segment.parent]
            continued |= {answers[segment.parent]} if segment.sampled else set()
            begin = 0 if segment.parent is None else reached.get(segment.parent)
            if begin is not None and prefix[begin : begin + len(segment.token_ids)] == segment.token_ids:
                reached[place] = begin + len(segment.token_ids)
        if not reached:
            return None, prefix
        ends = {place: 0 if (answer := answers[place]) is None else reached[answer] for place in reached}
        longest = ends[max(reached, key=lambda place: reached[place])]
        equal = [place for place in reached if ends[place] == longest]
        parent = max(equal, key=lambda place: (answers[place] not in continued, reached[place], place))
        return parent, prefix[reached[parent] :]

    def media_of(self, parent: int | None, read: Sequence[int], media: Media | None) -> Media | None:
        """Return the pictures of the prefix that ends with tokens that were read after segment ``parent``.

        Args:
            parent: As in :meth:`extend`.
            read: Token ids of the environment.
            media: Pictures among ``read``; None without.
        """
        path = list[Media | tuple[tuple[int, ...], bool]]([media or (tuple(read), False)])
        while parent is not None and parent != PROMPT:
            segment = self.segments[parent]
            path.append(segment.media or (segment.token_ids, segment.sampled))
            parent = segment.parent
        if parent == PROMPT:
            path.append(self.request.media or (self.request.prefix_ids, False))
        if not any(isinstance(part, Media) for part in path):
            return None
        parts = (part if isinstance(part, Media) else Media.of_text(part[0], drawn=part[1]) for part in reversed(path))
        return join_media(parts)

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    @property
    def answer(self) -> tuple[int, ...]:
        """Token ids of the last turn, which rewards score."""
        return next((segment.token_ids for segment in reversed(self.segments) if segment.sampled), ())

    def completion(self, text: str) -> str | list[dict[str, Any]]:
        """Return the messages from the first answer of the policy to its last one, whose content is ``text``.

        Rewritten contexts are left out. Returns the text if the environment uses no messages.
        """
        after = [dict(message) for message in self.messages[self.opening :] if not message.get(REWRITTEN)]
        answers = [place for place, message in enumerate(after) if message.get("role") == "assistant"]
        if not answers:
            return text
        said = after[answers[0] : answers[-1] + 1]
        return [*said[:-1], {**said[-1], "content": text}]

    def branches(self) -> list[tuple[int, ...]]:
        """Return the indices of the segments from each root to a leaf, in the order of the leaves."""
        return branches_of([segment.parent for segment in self.segments])


def branches_of(parents: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Return the indices of segments from each root to a leaf, in the order of the leaves, given their parents."""
    inner, found = set(parents), list[tuple[int, ...]]()
    for place in (place for place in range(len(parents)) if place not in inner):
        path = [place]
        while (parent := parents[path[-1]]) is not None and parent != PROMPT:
            path.append(parent)
        found.append(tuple(reversed(path)))
    return found
