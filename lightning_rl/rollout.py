"""Rollout: the one data structure, samples of a policy together with all that is known about them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor

from lightning_rl.transfer import to_device

RolloutT = TypeVar("RolloutT", bound="Rollout")

ROW, PROMPT, TOKEN = "row", "prompt", "token"
GREEDY_SCORE = "greedy_score"  # in ``extras``: the score of the greedy answer to a row's prompt
ROUTES = "routed_experts"  # in ``prompt_extras`` and ``token_extras``: see policy/expert_routes.py
SUM_PI_SQUARED = "sum_pi_squared"  # in ``token_extras``: of the whole vocabulary before a token, by the old policy
TURNS = "turns"  # in ``token_extras``: which turn drew a token, from 1; 0 for the environment's; :func:`context_starts`
TURN_REWARDS = "turn_rewards"  # in ``token_extras``: what the environment gave for a turn, at its last drawn token
SAMPLING_MASK = "sampling_mask"  # in ``token_extras``: see policy/sampling_mask.py


class Finish(IntEnum):
    """Why a response ended: as its engine said, or as the environment that it talked to."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    TURNS = 3  # the conversation had as many turns as it may
    FAILED = 4  # the environment could not go on


def along(axes: str, pad: float | int = 0) -> dict[str, Any]:
    """Metadata of a field: along which axes it runs and what fills its padding."""
    return {"axes": axes, "pad": pad}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """Samples of a policy, right-padded: B rows, P prompt positions, T response positions.

    A value is never edited: :meth:`replace` makes a new one, and select, concatenate, pad, move and save act on every
    field alike, so that none can be forgotten. Index t of every per-token field belongs to ``response_ids[:, t]``: a
    log-probability there is that of this token given all before it. ``prompt_extras`` belong to ``prompt_ids``.

    Raises:
        ValueError: if a field's shape does not fit the others; the message names the field.
    """

    prompt_ids: Int[Tensor, "B P"] = field(metadata=along(PROMPT))
    prompt_lengths: Int[Tensor, " B"] = field(metadata=along(ROW, pad=1))
    response_ids: Int[Tensor, "B T"] = field(metadata=along(TOKEN))
    response_lengths: Int[Tensor, " B"] = field(metadata=along(ROW))
    action_mask: Bool[Tensor, "B T"] = field(metadata=along(TOKEN, pad=False))
    groups: Int[Tensor, " B"] = field(metadata=along(ROW, pad=-1))
    sample_ids: Int[Tensor, " B"] = field(metadata=along(ROW, pad=-1))
    finish: UInt8[Tensor, " B"] = field(metadata=along(ROW, pad=Finish.STOP))
    policy_version: Int[Tensor, "B T"] = field(metadata=along(TOKEN, pad=-1))
    trained: Bool[Tensor, " B"] = field(metadata=along(ROW, pad=False))
    rewarded: Bool[Tensor, " B"] = field(metadata=along(ROW, pad=False))
    valid_tokens: Bool[Tensor, "B T"] = field(metadata=along(TOKEN, pad=False))
    rewards: Float[Tensor, " B"] = field(metadata=along(ROW))
    task_rewards: Mapping[str, Float[Tensor, " B"]] = field(default_factory=dict, metadata=along(ROW))
    rollout_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    old_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    ref_logprobs: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    values: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    advantages: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    returns: Float[Tensor, "B T"] | None = field(default=None, metadata=along(TOKEN))
    extras: Mapping[str, Shaped[Tensor, "B ..."]] = field(default_factory=dict, metadata=along(ROW))
    token_extras: Mapping[str, Shaped[Tensor, "B T ..."]] = field(default_factory=dict, metadata=along(TOKEN))
    prompt_extras: Mapping[str, Shaped[Tensor, "B P ..."]] = field(default_factory=dict, metadata=along(PROMPT))

    def __post_init__(self) -> None:
        """Freezes the dict fields and checks every shape against B, P and T."""
        rows = len(self.prompt_lengths)
        sizes = {ROW: (rows,), PROMPT: (rows, self.prompt_ids.shape[-1]), TOKEN: (rows, self.response_ids.shape[-1])}
        for field_name, axes, _, named in _columns(type(self)):
            value, expected = getattr(self, field_name), sizes[axes]
            if named:
                object.__setattr__(self, field_name, MappingProxyType(dict(value)))
                for key, tensor in value.items():
                    _check_shape(f"{field_name}/{key}", tensor, tensor.shape[: len(expected)], expected)
            elif value is not None:
                _check_shape(field_name, value, value.shape, expected)

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
        dtype: torch.dtype = torch.float32,
    ) -> RolloutT:
        """Samples that nobody has scored yet: every reward is 0, every row trains that was not aborted.

        Args:
            prompts: token ids of each row's prompt, at least one.
            responses: token ids of each row's response, EOS included when it was sampled.
            groups: which prompt each row answers.
            sample_ids: identity of each row; 0, 1, 2, ... by default.
            finish: why each response ended; :attr:`Finish.STOP` by default.
            versions: of the weights that drew each token; 0 by default.
            actions: whether the policy sampled each token of each response; by default it did.
            dtype: of the rewards.
        """
        prompt_ids, prompt_lengths = pad_lists(prompts, torch.int64)
        response_ids, lengths = pad_lists(responses, torch.int64)
        inside = torch.arange(response_ids.shape[1]) < lengths[:, None]
        sampled = inside if actions is None else pad_lists(actions, torch.bool)[0]
        version = torch.zeros_like(response_ids)
        if versions is not None:
            version, _ = pad_lists(versions, torch.int64)
        ends = torch.tensor([Finish.STOP] * len(lengths) if finish is None else list(finish), dtype=torch.uint8)
        trained = (ends != Finish.ABORT) & (ends != Finish.FAILED)
        return cls(
            prompt_ids=prompt_ids,
            prompt_lengths=prompt_lengths,
            response_ids=response_ids,
            response_lengths=lengths,
            action_mask=sampled,
            valid_tokens=sampled,
            groups=torch.tensor(groups, dtype=torch.int64),
            sample_ids=torch.arange(len(lengths))
            if sample_ids is None
            else torch.tensor(sample_ids, dtype=torch.int64),
            finish=ends,
            policy_version=torch.where(sampled, version, -1),
            trained=trained,
            rewarded=trained,
            rewards=torch.zeros(len(lengths), dtype=dtype),
        )

    def __len__(self) -> int:
        """B, the number of rows, padding included."""
        return len(self.prompt_lengths)

    @property
    def width(self) -> int:
        """T, the number of response positions."""
        return self.response_ids.shape[1]

    @property
    def real(self) -> Bool[Tensor, " B"]:
        """Rows that are samples and not padding, shape [B]."""
        return self.sample_ids >= 0

    @property
    def drawn_lengths(self) -> Int[Tensor, " B"]:
        """How many tokens of each response the policy drew, shape [B]: all of them unless an environment speaks too."""
        return self.action_mask.sum(-1)

    @property
    def cut_off(self) -> Bool[Tensor, " B"]:
        """Rows that a limit ended, of tokens or of turns, shape [B]."""
        return (self.finish == Finish.LENGTH) | (self.finish == Finish.TURNS)

    @property
    def failures(self) -> Bool[Tensor, " B"]:
        """Rows that the engine or the environment gave up, which neither train nor count, shape [B]."""
        return (self.finish == Finish.ABORT) | (self.finish == Finish.FAILED)

    def require(self, name: str) -> Tensor:
        """A field that must be there.

        Raises:
            ValueError: if it is None.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(f'expected a rollout with "{name}", got none: name it in `reads`, so that it is provided')
        return value

    def replace(self: RolloutT, **changes: Any) -> RolloutT:
        """A new value with some fields changed."""
        return dataclasses.replace(self, **changes)

    def map(self: RolloutT, function: Callable[[Tensor, str, float], Tensor]) -> RolloutT:
        """Applies ``function(tensor, axes, pad)`` to every tensor of every field."""
        return type(self)(**_map(self, function))

    def select(self: RolloutT, rows: Tensor, *, width: int | None = None) -> RolloutT:
        """The rows of an index [b] int64 or a mask [B] bool, in that order, with every field; cut to ``width``."""
        index = (rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows).to(self.groups.device)

        def pick(tensor: Tensor, axes: str, pad: float) -> Tensor:
            del pad
            return (tensor[:, :width] if axes == TOKEN else tensor).index_select(0, index)

        return self.map(pick)

    def fit_width(self: RolloutT, width: int) -> RolloutT:
        """Cuts or pads the response axis to ``width`` positions."""
        return self.map(lambda tensor, axes, pad: _resize(tensor, width, pad) if axes == TOKEN else tensor)

    def to(self: RolloutT, device: torch.device | str) -> RolloutT:
        """Every tensor on ``device``."""
        return self.map(lambda tensor, _axes, _pad: to_device(tensor, device))

    def padding_rows(self: RolloutT, number: int) -> RolloutT:
        """``number`` rows of padding with the same set of fields: ids -1, one prompt token, no response."""
        return self.map(lambda tensor, _axes, pad: tensor.new_full((number, *tensor.shape[1:]), pad))

    def sanitize(self: RolloutT) -> RolloutT:
        """0 at every invalid token of every float field, so that NaN there reaches neither value nor gradient."""

        def clean(tensor: Tensor, axes: str, pad: float) -> Tensor:
            del pad
            if axes != TOKEN or not tensor.is_floating_point():
                return tensor
            mask = self.valid_tokens.reshape(*self.valid_tokens.shape, *[1] * (tensor.dim() - 2))
            return torch.where(mask, tensor, 0.0)

        return self.map(clean)

    def versions(self) -> dict[str, tuple[int, int]]:
        """Identity and write counter of every tensor, by field: equal before and after exactly if nobody wrote in
        place.
        """
        return {name: (id(tensor), tensor._version) for name, tensor in self.tensors()}  # noqa: SLF001

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor with its name, entries of dict fields as ``field/key``."""
        columns = _columns(type(self))
        return [entry for column in columns for entry in _entries(column, getattr(self, column.name))]

    def state(self) -> dict[str, Tensor]:
        """A flat dict of tensors that loads under ``weights_only=True``."""
        return dict(self.tensors())

    @classmethod
    def from_state(cls: type[RolloutT], state: Mapping[str, Tensor]) -> RolloutT:
        """The inverse of :meth:`state`."""
        values: dict[str, Any] = {}
        for name, tensor in state.items():
            stem, slash, key = name.partition("/")
            if slash:
                values.setdefault(stem, {})[key] = tensor
            else:
                values[name] = tensor
        return cls(**values)

    def __reduce__(self) -> tuple[Callable[..., "Rollout"], tuple[dict[str, Tensor]]]:
        """Pickles and copies through :meth:`state`; the read-only mappings do neither by themselves."""
        return (type(self).from_state, (self.state(),))


def context_starts(rollout: Rollout) -> Bool[Tensor, "B T"]:
    """Where a response goes on with a context that its environment has rewritten, shape [B, T].

    What comes from there on has read nothing of what is before. Such a context is a prompt within the response: its
    tokens have minus the number of the turn behind which they follow in ``token_extras["turns"]``.
    """
    if TURNS not in rollout.token_extras:
        return torch.zeros_like(rollout.action_mask)
    turns = rollout.token_extras[TURNS]
    return (turns < 0) & (turns != torch.nn.functional.pad(turns, (1, 0))[:, :-1])


def spans_of(rollout: Rollout, row: int) -> list[tuple[bool, list[int]]]:
    """A response cut where the speaker changes: whether the policy drew a part, and its token ids."""
    length = int(rollout.response_lengths[row])
    ids, drawn = rollout.response_ids[row, :length].tolist(), rollout.action_mask[row, :length].tolist()
    turns = rollout.token_extras[TURNS][row, :length].tolist() if TURNS in rollout.token_extras else drawn
    spans: list[tuple[bool, list[int]]] = []
    for place, token in enumerate(ids):
        if place == 0 or turns[place] != turns[place - 1]:
            spans.append((drawn[place], []))
        spans[-1][1].append(token)
    return spans


def pad_rows(rows: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Int[Tensor, " B"]]:
    """Rows [L, ...] of different lengths as one tensor [B, T, ...], filled with 0 on the right, and their lengths."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    joined = torch.cat(list(rows)).to(dtype) if rows else torch.zeros(0, dtype=dtype)
    return _pad(joined, lengths), lengths


def pad_lists(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[Tensor, Int[Tensor, " B"]]:
    """The same of rows [L] of plain numbers, or of tensors of them, as one tensor [B, T]."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    joined = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
    return _pad(torch.from_numpy(joined).to(dtype), lengths), lengths


def _pad(joined: Tensor, lengths: Int[Tensor, " B"]) -> Tensor:
    width = max(1, int(lengths.max())) if len(lengths) else 1
    inside = (torch.arange(width) < lengths[:, None]).reshape(len(lengths), width, *[1] * (joined.dim() - 1))
    return joined.new_zeros(len(lengths), width, *joined.shape[1:]).masked_scatter_(inside, joined)


def concatenate(parts: Sequence[Rollout]) -> Rollout:
    """Joins rollouts row by row, padded to the widest prompt and response.

    Raises:
        ValueError: if the parts are none or do not carry the same set of fields; the message names the difference.
    """
    if not parts:
        raise ValueError("expected at least one rollout to concatenate, got none")
    names = [{name for name, _ in part.tensors()} for part in parts]
    if any(other != names[0] for other in names):
        raise ValueError(f"expected rollouts with the same fields, but only some have {_difference(names)}")
    sizes = {PROMPT: max(part.prompt_ids.shape[1] for part in parts), TOKEN: max(part.width for part in parts)}

    def widen(tensor: Tensor, axes: str, pad: float) -> Tensor:
        return tensor if axes == ROW else _resize(tensor, sizes[axes], pad)

    parts = [part for part in parts if len(part)] or parts[:1]  # no rows do not know what their extras look like
    columns_of = [_map(part, widen) for part in parts]
    joined: dict[str, Any] = {}
    for name, first in columns_of[0].items():
        if isinstance(first, Mapping):
            joined[name] = {key: torch.cat([values[name][key] for values in columns_of]) for key in first}
        else:
            joined[name] = None if first is None else torch.cat([values[name] for values in columns_of])
    return type(parts[0])(**joined)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise ValueError(f"expected {name} of shape {list(expected)}, got {list(tensor.shape)}")


class _Column(NamedTuple):
    """A field, as its metadata describes it."""

    name: str
    axes: str
    pad: float
    named: bool  # a mapping from names to tensors


@cache
def _columns(kind: type[Rollout]) -> tuple[_Column, ...]:
    return tuple(
        _Column(spec.name, spec.metadata["axes"], spec.metadata["pad"], spec.default_factory is dict)
        for spec in dataclasses.fields(kind)
    )


def _entries(column: _Column, value: Any) -> list[tuple[str, Tensor]]:
    if column.named:
        return [(f"{column.name}/{key}", tensor) for key, tensor in value.items()]
    return [] if value is None else [(column.name, value)]


def _map(rollout: Rollout, function: Callable[[Tensor, str, float], Tensor]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, axes, pad, named in _columns(type(rollout)):
        value = getattr(rollout, name)
        if named:
            changed[name] = {key: function(tensor, axes, pad) for key, tensor in value.items()}
        else:
            changed[name] = None if value is None else function(value, axes, pad)
    return changed


def _resize(tensor: Tensor, width: int, pad: float) -> Tensor:
    have = tensor.shape[1]
    if have >= width:
        return tensor[:, :width]
    return torch.cat([tensor, tensor.new_full((len(tensor), width - have, *tensor.shape[2:]), pad)], 1)


def _difference(names: list[set[str]]) -> str:
    return ", ".join(sorted(set.union(*names) - set.intersection(*names)))
