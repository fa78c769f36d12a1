"""Rollout: samples of a policy with their rewards, log-probabilities and advantages."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, overload
from zlib import crc32

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from lightning_rl.fields import (
    PROMPT,
    ROW,
    TOKEN,
    Axis,
    Field,
    Function,
    Items,
    Ragged,
    Shapes,
    concatenate_items,
    declare,
    fields_of,
)
from lightning_rl.samples import FinishReason, Media, Segment, Trajectory
from lightning_rl.samples.media import join_items
from lightning_rl.utils.device import to_device
from lightning_rl.utils.renamed import Moved

RolloutT = TypeVar("RolloutT", bound="Rollout")
Value = TypeVar("Value")

GREEDY_SCORE = "greedy_score"  # in ``extras``: score of a greedy response to the prompt of each row
ROUTES = "routed_experts"  # in ``prompt_extras`` and ``token_extras``: see policy/expert_routes.py
EXPERT_LOAD = "expert_load"  # in ``extras``: share of tokens of each expert in the row's optimizer step, [B, E]
SUM_PI_SQUARED = "sum_pi_squared"  # in ``token_extras``: sum over the vocabulary of squared old probabilities
NO_PARENT = -2  # parent of a new context in ``segments``
ROLES = "roles"  # in ``token_extras``: see role_number; 0 for tokens that the policy did not sample
TURN_REWARDS = "turn_rewards"  # in ``token_extras``: reward of each turn, stored at its last sampled token
PICTURES = Items("pictures", shared=True)
SAMPLING_MASK = "sampling_mask"  # in ``token_extras``: see policy/sampling_mask.py
# In ``token_extras``: the k likeliest tokens of the distribution that each token was sampled from, shape [B, T, k].
TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"
FORMER_NAMES = {"task_rewards": "rewards_by_function"}  # of fields, in older checkpoints and recordings
FORMER_TURNS = "turns"  # in ``token_extras`` there, instead of ``segments``: see turn_numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Samples of a policy, right-padded: B rows, P prompt positions, T response positions.

    Two samples of one prompt: ``prompt_ids`` [[3, 4], [3, 4]], ``response_ids`` [[5, 6, 1], [7, 1, 0]],
    ``response_lengths`` [3, 2], ``groups`` [64, 64], ``sample_ids`` [512, 513], ``rewards`` [1.0, 0.0].

    Immutable: :meth:`replace` returns a new object. :meth:`select`, :func:`concatenate`, :meth:`to` and :meth:`state`
    apply to every field. Position t of a per-token field belongs to ``response_ids[:, t]``; a log-probability is
    log p(``response_ids[:, t]`` | all previous tokens of its context).

    Attributes:
        prompt_ids: Token ids of the prompts.
        prompt_lengths: Number of tokens of each prompt.
        response_ids: Token ids of the responses. In conversations they include the tokens of the environment.
        response_lengths: Number of tokens of each response.
        action_mask: True for tokens that the policy sampled.
        groups: Index of each row's prompt. Rows with equal index are a group. The index is -1 for padding rows.
        sample_ids: Id of each row, unique in a run; -1 for padding rows.
        finish: :class:`FinishReason` of each row.
        policy_version: Version of the weights that sampled each token; -1 for other tokens.
        trained: True for rows that are trained on.
        rewarded: True for trained rows whose rewards enter statistics such as a group's mean.
        valid_tokens: True for tokens in the loss: tokens of ``action_mask`` in the rows of ``trained``. Before
            ``exclude_rows`` (rollouts/estimate_signal.py) has run, it is equal to ``action_mask``.
        rewards: Weighted sum of the reward functions, in float64.
        rewards_by_function: Values of each reward function by name, in float64; NaN where it returned None.
        rollout_logprobs: Log-probabilities that the engine computed while sampling.
        old_logprobs: Log-probabilities of the policy before the first optimizer step on the rollout.
        ref_logprobs: Log-probabilities of the frozen reference.
        values: Predictions of the critic.
        advantages: Advantage of each token, in the dtype of the rewards.
        returns: Targets of the critic, in the dtype of the rewards.
        segments: Segments of each row of a conversation, in the order in which they were made: position of the first
            token in the response, index of the segment that it follows, and turn. The index is -1 behind the prompt,
            and -2 for a new context, which follows nothing. The turn counts from 1; it is 0 for tokens that the
            environment wrote. None without an environment.
        extras: Further tensors per row, by name.
        token_extras: Further tensors per response token, by name.
        prompt_extras: Further tensors per prompt token, by name.
        prompt_items: Arguments of the model with entries for the pictures of the prompts, by name; rows of one prompt
            share them. An argument ``name[None]`` gets a further first axis.
        response_items: Those of pictures in the responses, which the environment returned.
        segment_items: Number of entries of each segment in ``response_items``, by name.
        prompt_types: Arguments of the model with one entry for each token of the prompts, such as its modality.
        response_types: Those of the responses.

    Raises:
        ValueError: If the shape of a field does not match; the message names the field.
    """

    prompt_ids: Int[Tensor, "B P"] = field(metadata=declare(PROMPT))
    prompt_lengths: Int[Tensor, " B"] = field(metadata=declare(ROW, pad=1))
    response_ids: Int[Tensor, "B T"] = field(metadata=declare(TOKEN))
    response_lengths: Int[Tensor, " B"] = field(metadata=declare(ROW))
    action_mask: Bool[Tensor, "B T"] = field(metadata=declare(TOKEN, pad=False))
    groups: Int[Tensor, " B"] = field(metadata=declare(ROW, pad=-1))
    sample_ids: Int[Tensor, " B"] = field(metadata=declare(ROW, pad=-1))
    finish: UInt8[Tensor, " B"] = field(metadata=declare(ROW, pad=FinishReason.STOP))
    policy_version: Int[Tensor, "B T"] = field(metadata=declare(TOKEN, pad=-1))
    trained: Bool[Tensor, " B"] = field(metadata=declare(ROW, pad=False))
    rewarded: Bool[Tensor, " B"] = field(metadata=declare(ROW, pad=False))
    valid_tokens: Bool[Tensor, "B T"] = field(metadata=declare(TOKEN, pad=False))
    rewards: Float[Tensor, " B"] = field(metadata=declare(ROW))
    rewards_by_function: Mapping[str, Float[Tensor, " B"]] = field(
        default_factory=dict, metadata=declare(ROW, sparse=True)
    )
    rollout_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    old_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    ref_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    values: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    advantages: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    returns: Float[Tensor, "B T"] | None = field(default=None, metadata=declare(TOKEN, shown=True))
    segments: Ragged | None = field(default=None, metadata=declare(Items("segments", torch.int64)))
    extras: Mapping[str, Shaped[Tensor, "B ..."]] = field(default_factory=dict, metadata=declare(ROW))
    token_extras: Mapping[str, Shaped[Tensor, "B T ..."]] = field(default_factory=dict, metadata=declare(TOKEN))
    prompt_extras: Mapping[str, Shaped[Tensor, "B P ..."]] = field(default_factory=dict, metadata=declare(PROMPT))
    prompt_items: Mapping[str, Ragged] = field(default_factory=dict, metadata=declare(PICTURES, is_argument=True))
    response_items: Mapping[str, Ragged] = field(default_factory=dict, metadata=declare(PICTURES, is_argument=True))
    segment_items: Mapping[str, Ragged] = field(
        default_factory=dict, metadata=declare(Items("segments"), is_argument=True)
    )
    prompt_types: Mapping[str, Int[Tensor, "B P"]] = field(
        default_factory=dict, metadata=declare(PROMPT, is_argument=True)
    )
    response_types: Mapping[str, Int[Tensor, "B T"]] = field(
        default_factory=dict, metadata=declare(TOKEN, is_argument=True)
    )

    task_rewards = Moved("rewards_by_function")

    def __post_init__(self) -> None:
        """Freeze the dict fields and check every shape against B, P and T."""
        shapes = Shapes.of(len(self.prompt_lengths), self.prompt_ids.shape[-1], self.response_ids.shape[-1])
        for spec in fields_of(type(self)):
            value = getattr(self, spec.name)
            if spec.is_mapping:
                object.__setattr__(self, spec.name, MappingProxyType(dict(value)))
                for key, entry in value.items():
                    spec.axis.check(f"{spec.name}/{key}", entry, shapes, exact=False)
            elif value is not None:
                spec.axis.check(spec.name, value, shapes, exact=True)

    @classmethod
    def of_samples(
        cls: type[RolloutT],
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        groups: Sequence[int],
        sample_ids: Sequence[int] | None = None,
        finish: Sequence[int] | None = None,
        versions: Sequence[Sequence[int]] | None = None,
        actions: Sequence[Sequence[bool]] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> RolloutT:
        """Create a rollout with zero rewards. Rows that end with ABORT or FAILED are not trained on.

        Args:
            prompts: Token ids of each row's prompt, at least one token each.
            responses: Token ids of each row's response, including EOS if it was sampled.
            groups: Prompt index of each row.
            sample_ids: Id of each row; 0, 1, 2, ... by default.
            finish: Finish reason of each response; :attr:`FinishReason.STOP` by default.
            versions: Version of the weights that sampled each token; 0 by default.
            actions: True for tokens that the policy sampled; all tokens by default.
            dtype: Dtype of the rewards.
        """
        prompt_ids, prompt_lengths = pad_lists(prompts, torch.int64)
        response_ids, lengths = pad_lists(responses, torch.int64)
        inside = torch.arange(response_ids.shape[1]) < lengths[:, None]
        sampled = inside if actions is None else pad_lists(actions, torch.bool)[0]
        version = torch.zeros_like(response_ids) if versions is None else pad_lists(versions, torch.int64)[0]
        ends = torch.tensor([FinishReason.STOP] * len(lengths) if finish is None else list(finish), dtype=torch.uint8)
        trained = (ends != FinishReason.ABORT) & (ends != FinishReason.FAILED)
        return cls(
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            response_ids=response_ids,
            response_lengths=lengths,
            action_mask=sampled,
            valid_tokens=sampled,
            groups=torch.tensor(groups, dtype=torch.int64),
            sample_ids=torch.tensor(range(len(lengths)) if sample_ids is None else sample_ids, dtype=torch.int64),
            finish=ends,
            policy_version=torch.where(sampled, version, -1),
            trained=trained,
            rewarded=trained,
            rewards=torch.zeros(len(lengths), dtype=dtype),
        )

    @classmethod
    def of(
        cls: type[RolloutT],
        trajectories: Sequence[Trajectory],
        *,
        dtype: torch.dtype = torch.float64,
        recorded: Collection[str] = (),
        logprobs: bool = False,
        turns: bool = False,
        roles: bool = False,
    ) -> RolloutT:
        """Create a rollout with zero rewards; a row is the segments of a trajectory, in the order of the segments.

        Only tokens that the policy sampled are actions and have a log-probability.

        Args:
            trajectories: One trajectory per row.
            dtype: Dtype of log-probabilities; rewards are in float64.
            recorded: Names of the per-token extras of segments.
            logprobs: True if sampled segments have log-probabilities.
            turns: True to store the segments, and the turn reward of each token.
            roles: True to store the role of each token.

        Raises:
            ValueError: If a sampled segment lacks values that its engine promised.
        """
        rows = [each.segments for each in trajectories]
        rollout = cls.of_samples(
            [each.request.prefix_ids for each in trajectories],
            [list(chain.from_iterable(segment.token_ids for segment in row)) for row in rows],
            groups=[each.prompt.index for each in trajectories],
            sample_ids=[each.request.sample_id for each in trajectories],
            finish=[each.finish for each in trajectories],
        )
        sampled = [segment for row in rows for segment in row if segment.sampled]
        actions = rollout.action_mask
        if turns:
            rollout = rollout.replace(segments=_tree(rows))
            actions = turn_numbers(rollout) > 0

        def spread(values: Tensor, fill: float = 0) -> Tensor:
            """Scatter one value per sampled token, concatenated over segments, to ``[B, T]``."""
            if len(values) != (number := int(actions.sum())):
                raise ValueError(
                    f"expected a value for each of {number} sampled tokens from the engine, got {len(values)}"
                )
            return values.new_full(actions.shape, fill).masked_scatter_(actions, values)

        extras = {name: _pad_extra([_extra_of(row, name) for row in rows]) for name in sorted(recorded)}
        if turns:
            extras |= {TURN_REWARDS: spread(_turn_rewards(sampled))}
        if roles:
            numbers = [role_number(each.role) for each in sampled for _ in each.token_ids]
            extras |= {ROLES: spread(torch.tensor(numbers, dtype=torch.int64))}
        pictures = [[media] if (media := each.request.media) is not None else [] for each in trajectories]
        replies = [[segment.media for segment in row if segment.media is not None] for row in rows]
        prompts = [each.prompt_extras if each.segments else None for each in trajectories]
        lengths = rollout.prompt_lengths.tolist()
        return rollout.replace(
            action_mask=actions,
            valid_tokens=actions,
            policy_version=spread(_versions_of(sampled), -1),
            rollout_logprobs=spread(_logprobs_of(sampled).to(dtype)) if logprobs else None,
            token_extras=extras,
            prompt_extras={
                name: _pad_extra(
                    [
                        None if values is None else _check_extra(values, name, length)
                        for values, length in zip(prompts, lengths, strict=True)
                    ]
                )
                for name in sorted({*recorded} & {ROUTES})
            },
            prompt_items=_items(pictures),
            response_items=_items(replies),
            segment_items=_items_of_segments(rows) if turns else {},
            prompt_types=_types(
                [
                    [(media, length) for media in row] or [(None, length)]
                    for row, length in zip(pictures, lengths, strict=True)
                ]
            ),
            response_types=_types([[(segment.media, len(segment.token_ids)) for segment in row] for row in rows]),
        )

    def __len__(self) -> int:
        """Return B, the number of rows, including padding rows."""
        return len(self.prompt_lengths)

    @property
    def width(self) -> int:
        """Number of response positions T."""
        return self.response_ids.shape[1]

    @property
    def real(self) -> Bool[Tensor, " B"]:
        """Mask of the rows that are not padding, shape [B]."""
        return self.sample_ids >= 0

    @property
    def sampled_lengths(self) -> Int[Tensor, " B"]:
        """Number of sampled tokens of each response, not counting those of an environment, shape [B]."""
        return self.action_mask.sum(-1)

    @property
    def truncated(self) -> Bool[Tensor, " B"]:
        """Mask of the rows truncated by a limit on tokens or turns, shape [B]."""
        return (self.finish == FinishReason.LENGTH) | (self.finish == FinishReason.TURNS)

    @property
    def failed(self) -> Bool[Tensor, " B"]:
        """Mask of the rows that the engine or the environment failed to finish, shape [B]."""
        return (self.finish == FinishReason.ABORT) | (self.finish == FinishReason.FAILED)

    @overload
    def require(self, name: str) -> Tensor: ...
    @overload
    def require(self, name: str, kind: type[Value]) -> Value: ...
    def require(self, name: str, kind: type[Any] = Tensor) -> Any:
        """Return the value of a field that a callback or loss needs, or of an entry such as ``"token_extras/teacher"``.

        Args:
            name: Name of the field or entry.
            kind: Class of the value: :class:`.Ragged` for a ragged field such as ``segments``.

        Raises:
            ValueError: If the value is None or of another class.
        """
        stem, _, key = name.partition("/")
        value = getattr(self, stem).get(key) if key else getattr(self, stem)
        if value is None and name == "segments":
            raise ValueError(
                "expected segments, got None: pass environment= to the module, since only conversations have them, and "
                'add "segments" to "reads_at_loss" of a callback that reads them at the loss'
            )
        if value is None:
            raise ValueError(
                f'expected the rollout field "{name}" to be set, got None: add its name to the attribute "reads" of '
                'the loss, or to "reads" or "reads_at_loss" of the callback'
            )
        if not isinstance(value, kind):
            got = type(value).__name__
            raise ValueError(
                f'expected the rollout field "{name}" as {kind.__name__}, got {got}: pass {got} to require'
            )
        return value

    def replace(self: RolloutT, **changes: Any) -> RolloutT:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)

    def map(self: RolloutT, function: Function) -> RolloutT:
        """Return a copy with ``function(tensor, axis, pad)`` applied to every tensor of every field."""
        return self._each(lambda axis, value, pad: axis.map(value, function, pad))

    def clone(self: RolloutT) -> RolloutT:
        """Return a copy whose tensors share no memory with this one, except ``token_extras`` and ``prompt_extras``."""
        return self.map(lambda tensor, _axis, _pad: tensor.clone()).replace(
            token_extras=self.token_extras, prompt_extras=self.prompt_extras
        )

    def select(self: RolloutT, rows: Tensor, *, width: int | None = None) -> RolloutT:
        """Select rows by an int64 index of shape [b] or a bool mask of shape [B].

        Args:
            rows: Index or mask.
            width: Maximum number of response positions to keep; None for all.
        """
        index = (rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows).to(self.groups.device)
        cut = width if width is not None and width < self.width else None
        return self._each(lambda axis, value, _pad: axis.select(value, index, cut))

    def fit_width(self: RolloutT, width: int) -> RolloutT:
        """Return a copy with the response axis cut or padded to ``width`` positions."""
        return self._each(lambda axis, value, pad: axis.resize(value, width, pad))

    def to(self: RolloutT, device: torch.device | str) -> RolloutT:
        """Return a copy with every tensor on ``device``, but arguments of the model."""
        kept = {spec.name: getattr(self, spec.name) for spec in fields_of(type(self)) if spec.is_argument}
        moved = self.without_arguments().map(lambda tensor, _axis, _pad: to_device(tensor, device))
        return moved.replace(**kept)

    def without_arguments(self: RolloutT) -> RolloutT:
        """Return a copy without the arguments of the model, which layouts have."""
        return self.replace(**{spec.name: {} for spec in fields_of(type(self)) if spec.is_argument})

    def padding_rows(self: RolloutT, number: int) -> RolloutT:
        """Return ``number`` padding rows: groups and sample ids are -1, prompts have one token, responses none."""
        return self._each(lambda axis, value, pad: axis.padding(value, number, pad))

    def sanitize(self: RolloutT) -> RolloutT:
        """Return a copy in which every per-token float field is 0 where ``valid_tokens`` is False."""
        invalid = ~self.valid_tokens

        def clean(tensor: Tensor, axis: Axis[Any], pad: float) -> Tensor:
            del pad
            if axis is not TOKEN or not tensor.is_floating_point():
                return tensor
            mask = invalid if tensor.dim() == 2 else invalid.reshape(*invalid.shape, *[1] * (tensor.dim() - 2))
            return tensor.masked_fill(mask, 0)

        return self.map(clean)

    def entries(self) -> Iterator[tuple[Field, str, Any]]:
        """Yield every value with its field and its name; entries of dict fields are named ``field/key``."""
        for spec in fields_of(type(self)):
            value = getattr(self, spec.name)
            if spec.is_mapping:
                for key, entry in value.items():
                    yield spec, f"{spec.name}/{key}", entry
            elif value is not None:
                yield spec, spec.name, value

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return every tensor of :meth:`entries` with its name."""
        return [named for spec, name, value in self.entries() for named in spec.axis.tensors(name, value)]

    def state(self) -> dict[str, Tensor]:
        """Return a flat dict of tensors that loads under ``weights_only=True``."""
        return dict(self.tensors())

    @classmethod
    def from_state(cls: type[RolloutT], state: Mapping[str, Tensor]) -> RolloutT:
        """Create a rollout from the return value of :meth:`state`, which may have older names of fields."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            stem, _, part = name.partition("/")
            parts.setdefault(FORMER_NAMES.get(stem, stem), {})[part] = tensor
        declared = {spec.name: spec for spec in fields_of(cls)}
        if strange := parts.keys() - declared.keys():
            raise ValueError(f"expected fields of {cls.__name__}, got {min(strange)!r}")
        turns = parts.get("token_extras", {}).pop(FORMER_TURNS, None)
        restored: dict[str, Any] = {name: declared[name].restore(values) for name, values in parts.items()}
        if turns is not None:
            restored["segments"] = segments_of(turns, state["response_lengths"])
        return cls(**restored)

    def _each(self: RolloutT, operation: Callable[[Axis[Any], Any, float], Any]) -> RolloutT:
        """Return a copy with ``operation(axis, value, pad)`` in place of every value."""
        changed: dict[str, Any] = {}
        for spec in fields_of(type(self)):
            name, axis, pad, value = spec.name, spec.axis, spec.pad, getattr(self, spec.name)
            if spec.is_mapping:
                changed[name] = {key: operation(axis, entry, pad) for key, entry in value.items()}
            elif value is not None:
                changed[name] = operation(axis, value, pad)
        return type(self)(**changed)

    def __reduce__(self) -> tuple[Callable[..., "Rollout"], tuple[type["Rollout"], dict[str, Tensor]]]:
        """Pickle and copy through :meth:`state`, since a read-only mapping can be neither pickled nor copied."""
        return rebuild_rollout, (type(self), self.state())


def _items(rows: Sequence[Sequence[Media]]) -> dict[str, Ragged]:
    """Return the arguments of the model for the pictures of rows; rows with the same pictures share them."""
    keys = [tuple(media.key for media in row) for row in rows]
    distinct = {key: row for key, row in zip(keys, rows, strict=True) if row}
    joined = {key: join_items(media.items for media in row) for key, row in distinct.items()}
    names, fields = dict.fromkeys(name for items in joined.values() for name in items), dict[str, Ragged]()
    for name in names:
        sizes = {key: len(items[name]) if name in items else 0 for key, items in joined.items()}
        starts = dict(zip(sizes, accumulate([0, *sizes.values()]), strict=False))
        counts, begins = (torch.tensor([places.get(key, 0) for key in keys]) for places in (sizes, starts))
        values = concatenate_items([items[name] for items in joined.values() if name in items])
        fields[name] = Ragged(values, counts, begins)
    return fields


def _items_of_segments(rows: Sequence[Sequence[Segment]]) -> dict[str, Ragged]:
    """Return the field ``segment_items`` of rows."""
    every = [{} if segment.media is None else segment.media.items for row in rows for segment in row]
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    names = dict.fromkeys(name for items in every for name in items)
    return {
        name: Ragged(torch.tensor([len(items.get(name, ())) for items in every], dtype=torch.int64), counts)
        for name in names
    }


def _types(rows: Sequence[Sequence[tuple[Media | None, int]]]) -> dict[str, Int[Tensor, "B L"]]:
    """Return the arguments of the model with one entry for each token, given media and length of each part of rows."""

    def of_row(row: Sequence[tuple[Media | None, int]], name: str) -> Int[Tensor, " L"]:
        parts = [
            torch.zeros(length, dtype=torch.int64) if media is None else media.types[name] for media, length in row
        ]
        return torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])

    names = dict.fromkeys(name for row in rows for media, _ in row if media is not None for name in media.types)
    return {name: pad_rows([of_row(row, name) for row in rows], torch.int64)[0] for name in names}


def _tree(rows: Sequence[Sequence[Segment]]) -> Ragged:
    """Return the field ``segments`` of rows."""
    values = list[tuple[int, int, int]]()
    for row in rows:
        begin, turn = 0, 0
        for segment in row:
            turn += segment.sampled
            is_root = segment.parent is None
            number = turn if segment.sampled else -turn if is_root else 0
            values.append((begin, NO_PARENT if is_root else cast(int, segment.parent), number))
            begin += len(segment.token_ids)
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged(torch.tensor(values, dtype=torch.int64).reshape(-1, 3), counts)


def _versions_of(sampled: Sequence[Segment]) -> Int[Tensor, " A"]:
    """Return the policy version of each sampled token."""
    if all(len(each.versions) == 1 for each in sampled):
        lengths = torch.tensor([len(each.token_ids) for each in sampled], dtype=torch.int64)
        return torch.tensor([each.versions[0] for each in sampled], dtype=torch.int64).repeat_interleave(lengths)
    versions = (each.versions * len(each.token_ids) if len(each.versions) == 1 else each.versions for each in sampled)
    return torch.tensor(list(chain.from_iterable(versions)), dtype=torch.int64)


def _logprobs_of(sampled: Sequence[Segment]) -> Float[Tensor, " A"]:
    """Return the log-probability of each sampled token."""
    known = [each.logprobs for each in sampled if each.logprobs is not None]
    return torch.cat(known) if known else torch.zeros(0)


def _turn_rewards(sampled: Sequence[Segment]) -> Float[Tensor, " A"]:
    """Return the reward of each turn at its last sampled token, and 0 at the others."""
    values: list[float] = []
    for segment in sampled:
        if segment.token_ids:
            values += [*[0.0] * (len(segment.token_ids) - 1), segment.reward or 0.0]
    return torch.tensor(values, dtype=torch.float64)


def _extra_of(row: Sequence[Segment], name: str) -> Shaped[Tensor, "L ..."] | None:
    """Return one extra of each token of a row, 0 for tokens that were read without it; None without sampled tokens."""
    known = [_check_extra(each.extras, name, len(each.token_ids)) for each in row if each.sampled]
    if not known:
        return None
    answers = iter(known)
    return torch.cat(
        [
            next(answers)
            if each.sampled
            else each.extras.get(name, known[0].new_zeros(len(each.token_ids), *known[0].shape[1:]))
            for each in row
        ]
    )


def _check_extra(extras: Mapping[str, Tensor], name: str, length: int) -> Shaped[Tensor, "L ..."]:
    if name not in extras or len(extras[name]) != length:
        got = "nothing" if name not in extras else len(extras[name])
        raise ValueError(f"expected {name} for each of {length} tokens from the engine, got {got}")
    return extras[name]


def _pad_extra(values: Sequence[Tensor | None]) -> Tensor:
    """Pad one extra of all rows to a tensor, with 0 where a row lacks it."""
    known = next((value for value in values if value is not None), torch.zeros(0, dtype=torch.uint8))
    empty = known.new_zeros(0, *known.shape[1:])
    return pad_rows([empty if value is None else value for value in values], known.dtype)[0]


def rebuild_rollout(kind: type[Rollout], state: Mapping[str, Tensor]) -> Rollout:
    """Create a rollout of class ``kind`` from its state; called by pickle."""
    return kind.from_state(state)


def turn_numbers(rollout: Rollout) -> Int[Tensor, "B T"]:
    """Return the turn of each response token, shape [B, T]; needs ``segments``.

    It is k = 1, 2, ... if the policy sampled the token in turn k; 0 if the environment appended it, such as the result
    of a tool; -k if it belongs to a new context that the environment started after turn k.
    """
    row, begin, _, number = _segments(rollout)
    follows = torch.nn.functional.pad(row[1:] == row[:-1], (1, 0))[: len(row)]  # another segment of its row
    changes = number.new_zeros(len(rollout), rollout.width + 1)
    changes.index_put_(
        (row, begin.clamp(max=rollout.width)), number - torch.where(follows, number.roll(1), 0), accumulate=True
    )
    inside = torch.arange(rollout.width, device=row.device) < rollout.response_lengths[:, None]
    return torch.where(inside, changes.cumsum(1)[:, :-1], 0)


def role_number(role: str) -> int:
    """Return the number that stands for a role in tensors, equal in all processes."""
    return crc32(role.encode())


def attempts_of(rollout: Rollout) -> Int[Tensor, "B T"]:
    """Return the attempt of each sampled token, shape [B, T]; needs ``segments`` and the roles of tokens.

    It is the first turn of the token's role that its own turn continues, or else its own turn; 0 for other tokens.
    """
    turns, roles = turn_numbers(rollout), rollout.require(f"token_extras/{ROLES}").tolist()
    segments = list(zip(*(each.tolist() for each in _segments(rollout)), strict=True))
    attempts = turns.new_zeros(len(rollout), 1 + max([0, *(turn for *_, turn in segments)]))
    above = dict[tuple[int, int], dict[int, int]]()  # first turn of each role up to a segment
    places = Counter[int]()
    for row, begin, parent, turn in segments:
        firsts = above.get((row, parent), {})
        if turn > 0 and begin < rollout.width:
            role = roles[row][begin]
            firsts = {role: turn, **firsts}
            attempts[row, turn] = firsts[role]
        above[row, places[row]] = firsts
        places[row] += 1
    return attempts.gather(1, turns.clamp(min=0))


def segments_of(numbers: Int[Tensor, "B T"], lengths: Int[Tensor, " B"]) -> Ragged:
    """Return the field ``segments`` of responses whose tokens have some turn numbers."""
    starts = numbers != torch.nn.functional.pad(numbers, (1, 0))[:, :-1]
    starts[:, 0] = True
    starts &= torch.arange(numbers.shape[1], device=numbers.device) < lengths[:, None]
    row, begin = starts.nonzero(as_tuple=True)
    number, counts = numbers[row, begin], starts.sum(1)
    before = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row] - 1
    return Ragged(torch.stack([begin, torch.where(number < 0, NO_PARENT, before), number], 1).long(), counts)


def _segments(rollout: Rollout) -> tuple[Int[Tensor, " N"], ...]:
    """Return row, first position, parent and turn of every segment."""
    segments = rollout.require("segments", Ragged)
    rows, values = torch.arange(len(segments.counts)), segments.values
    row = to_device(rows.repeat_interleave(segments.counts, output_size=len(values)), values.device)
    return (row, *values.unbind(1))


class Tree(NamedTuple):
    """Nodes of rows, each a prompt or a segment: those of a row follow each other, the prompt first.

    A prompt of 2 tokens, an answer of 3 to it and another one of 1: row [0, 0, 0], parents [-1, 0, 0], starts
    [0, 2, 5], lengths [2, 3, 1], is_prompt [True, False, False].

    Attributes:
        row: Row of each node.
        parents: Node that it follows; -1 for a prompt or a new context.
        starts: Index of its first token among the tokens of prompts and responses, joined.
        lengths: Number of its tokens.
        is_prompt: True for prompts.
    """

    row: Int[Tensor, " n"]
    parents: Int[Tensor, " n"]
    starts: Int[Tensor, " n"]
    lengths: Int[Tensor, " n"]
    is_prompt: Bool[Tensor, " n"]


def tree_of(rollout: Rollout) -> Tree:
    """Return the nodes of rows; needs ``segments``."""
    of_segment, begin, parent, _ = _segments(rollout)
    prompts, every = rollout.prompt_lengths, torch.arange(len(rollout), device=of_segment.device)
    order = torch.cat([every, of_segment]).argsort(stable=True)
    row, is_prompt = torch.cat([every, of_segment])[order], order < len(every)
    base, ends = is_prompt.nonzero()[:, 0], (prompts + rollout.response_lengths).cumsum(0)
    above = torch.where(parent == NO_PARENT, -1, base[of_segment] + 1 + parent)
    first = ends - rollout.response_lengths
    starts = torch.cat([first - prompts, first[of_segment] + begin])[order]
    parents = torch.cat([torch.full_like(every, -1), above])[order]
    return Tree(row, parents, starts, torch.cat([starts[1:], ends[-1:]]) - starts, is_prompt)


def spans_of(rollout: Rollout, row: int) -> list[tuple[bool, list[int]]]:
    """Split the response of a row into spans; return (True if the policy sampled it, token ids) for each span.

    A span is a segment, or without ``segments`` a run of equal ``action_mask``.
    """
    length = int(rollout.response_lengths[row])
    ids, sampled = rollout.response_ids[row, :length].tolist(), rollout.action_mask[row, :length].tolist()
    cuts = {0, *(place for place in range(1, length) if sampled[place] != sampled[place - 1]), length}
    if rollout.segments is not None:
        cuts |= set(rollout.segments.of_row(row)[:, 0].tolist())
    ends = sorted(cuts)
    return [(sampled[begin], ids[begin:end]) for begin, end in pairwise(ends)]


def join_tokens(
    rows: Rollout, prompt: Shaped[Tensor, "B P ..."], response: Shaped[Tensor, "B T ..."]
) -> Shaped[Tensor, "F ..."]:
    """Return a value of each token of prompts and responses in one vector, row by row."""
    sides = (prompt, rows.prompt_lengths), (response, rows.response_lengths)
    inside = [torch.arange(values.shape[1], device=values.device) < lengths[:, None] for values, lengths in sides]
    joined, mask = torch.cat([prompt, response], 1), torch.cat(inside, 1)
    return joined.masked_select(mask) if joined.dim() == 2 else joined[mask]


def pad_rows(rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Int[Tensor, " B"]]:
    """Return rows [L, ...] of different lengths as one tensor [B, T, ...], right-padded with 0, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    joined = torch.cat(list(rows)).to(dtype) if rows else torch.zeros(0, dtype=dtype)
    return _pad(joined, lengths), lengths


def pad_lists(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, Int[Tensor, " B"]]:
    """Return sequences of integers as one tensor [B, T], right-padded with 0, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    joined = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
    return _pad(torch.from_numpy(joined).to(dtype), lengths), lengths


def _pad(joined: Tensor, lengths: Int[Tensor, " B"]) -> Tensor:
    width = max(1, int(lengths.max())) if len(lengths) else 1
    inside = (torch.arange(width) < lengths[:, None]).reshape(len(lengths), width, *[1] * (joined.dim() - 1))
    return joined.new_zeros(len(lengths), width, *joined.shape[1:]).masked_scatter_(inside, joined)


def concatenate(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate rollouts along rows, padded to the widest prompt and response.

    Raises:
        ValueError: If there are no parts or their fields differ; the message names the difference.
    """
    if not parts:
        raise ValueError("expected at least one rollout to concatenate, got none")
    if len(parts) == 1:
        return parts[0]
    names = [{name for name, _ in part.without_arguments().tensors()} for part in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"expected rollouts with the same fields, but only some have {_difference(names)}")
    shapes = Shapes.of(
        sum(map(len, parts)), max(part.prompt_ids.shape[1] for part in parts), max(part.width for part in parts)
    )
    parts = [part for part in parts if len(part)] or parts[:1]  # extras of empty rollouts may have fewer dimensions
    joined: dict[str, Any] = {}
    for spec in fields_of(type(parts[0])):
        join, values = (
            partial(spec.axis.concatenate, shapes=shapes, pad=spec.pad),
            [getattr(part, spec.name) for part in parts],
        )
        if spec.is_mapping:
            known = {key: value for entries in values for key, value in entries.items()}
            joined[spec.name] = {
                key: join(
                    [
                        entries[key] if key in entries else spec.axis.padding(known[key], len(part), spec.pad)
                        for entries, part in zip(values, parts, strict=True)
                    ]
                )
                for key in known
            }
        elif values[0] is not None:
            joined[spec.name] = join(values)
    return type(parts[0])(**joined)


def _difference(names: list[set[str]]) -> str:
    return ", ".join(sorted(set.union(*names) - set.intersection(*names)))
