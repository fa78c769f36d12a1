"""Contributions: calls every correction in the order of the names, checks what it gives, and combines."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.corrections.base import LossTerm, RLCallback
from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView
from lightning_rl.rollout import Rollout

RESERVED = frozenset(
    (
        "advantage",
        "groups",
        "kl",
        "length",
        "loss",
        "optim",
        "policy",
        "reward",
        "rollout",
        "staleness",
        "time",
        "val",
        "value",
    )
)


class PolicyFactor(NamedTuple):
    """What multiplies the policy loss, and the statistics of who did that."""

    factor: Tensor | None  # [b, T], None if nobody contributes
    stats: dict[str, Stat]


class Contributions:
    """The corrections of a run, sorted by name.

    Args:
        callbacks: those of the trainer that are RLCallbacks, in any order.

    Raises:
        ValueError: if a name is empty or used twice.
    """

    def __init__(self, callbacks: Sequence[RLCallback] = ()) -> None:
        self.callbacks = tuple(sorted(callbacks, key=lambda callback: callback.name))
        names = [callback.name for callback in self.callbacks]
        for callback in self.callbacks:
            if callback.name in RESERVED:
                raise ValueError(f'expected another name than "{callback.name}", under which the core logs')
            if not callback.name:
                raise ValueError(f"expected {type(callback).__name__} to set the class attribute `name`, got none")
            if names.count(callback.name) > 1:
                raise ValueError(f'expected unique names, got "{callback.name}" twice: use .named("another") on one')
        self._by_method = {
            method: tuple(callback for callback in self.callbacks if method in callback.contributes)
            for method in RLCallback.METHODS
        }

    def offering(self, method: str) -> tuple[RLCallback, ...]:
        """The callbacks that offer a contribution method."""
        return self._by_method[method]

    def reward_mask(self, rollout: Rollout) -> Tensor:
        """Rows that every callback lets take part in the reward, shape [B] bool."""
        combined = torch.ones(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        for _, mask in self._each("reward_mask", rollout, "row mask"):
            combined = combined & mask
        return combined

    def reward_bonus(self, rollout: Rollout) -> Tensor | None:
        """Sum of all bonuses, shape [B], or None."""
        return self._sum("reward_bonus", rollout, "row float")

    def keep_groups(self, rollout: Rollout) -> Tensor:
        """Rows of the groups that every callback keeps, shape [B] bool."""
        combined = torch.ones(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        for _, mask in self._each("keep_groups", rollout, "row mask"):
            combined = combined & mask
        return combined

    def exclude(self, rollout: Rollout) -> tuple[Tensor, dict[str, Stat]]:
        """Rows that any callback excludes, shape [B] bool, with each one's share of the real rows."""
        combined = torch.zeros(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        stats = {}
        for callback, mask in self._each("exclude", rollout, "row mask"):
            stats[f"{callback.name}/excluded"] = Stat.of(mask, rollout.real)
            combined = combined | mask
        return combined, stats

    def provide(self, rollout: Rollout) -> Rollout:
        """The rollout with every provided tensor in the field that its name begins with."""
        known = {"extras": dict(rollout.extras), "token_extras": dict(rollout.token_extras)}
        for callback, given in self._each("provide", rollout, None):
            for name, tensor in given.items():
                field, _, key = name.partition("/")
                shape = rollout.groups.shape if field == "extras" else rollout.response_ids.shape
                if field not in known or not key or tensor.shape[: len(shape)] != shape:
                    raise ValueError(
                        f'expected provide of {callback.name} to name its tensors "extras/..." [B, ...] or '
                        f'"token_extras/..." [B, T, ...], got "{name}" {list(tensor.shape)}'
                    )
                if key in known[field]:
                    raise ValueError(f'expected "{name}" from one callback, but {callback.name} provides it as well')
                known[field][key] = tensor.detach()
        return rollout.replace(**known)

    def token_reward(self, rollout: Rollout) -> Tensor | None:
        """Sum of all token rewards, shape [B, T], or None."""
        return self._sum("token_reward", rollout, "token float")

    def policy_factor(self, view: LossView) -> PolicyFactor:
        """The product of all masks and weights, shape [b, T]; statistics count the population before rejection."""
        factor, stats = None, dict[str, Stat]()
        for callback, mask in self._each("sequence_mask", view, "row mask"):
            stats[f"{callback.name}/rejected"] = Stat.of(~mask, view.trained)
            factor = _times(factor, mask[:, None].expand_as(view.valid_tokens).to(view.logprobs.dtype))
        for callback, mask in self._each("token_mask", view, "token mask"):
            stats[f"{callback.name}/rejected_tokens"] = Stat.of(~mask, view.valid_tokens)
            factor = _times(factor, mask.to(view.logprobs.dtype))
        for callback, weight in self._each("token_weight", view, "token float"):
            if weight.requires_grad:
                raise ValueError(f"expected a weight without gradient, but token_weight of {callback.name} carries one")
            population = Stat.of(weight, view.valid_tokens)
            stats |= {f"{callback.name}/weight_mean": population, f"{callback.name}/ess": population.ess()}
            factor = _times(factor, weight)
        return PolicyFactor(factor, stats)

    def loss_terms(self, view: LossView) -> list[tuple[str, LossTerm]]:
        """Every term with its callback's name."""
        terms = []
        for callback, term in self._each("loss_term", view, None):
            _check(callback, "loss_term", term.per_token, view, "token float")
            terms.append((callback.name, term))
        return terms

    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        """All contexts around a training forward, nested."""
        with ExitStack() as stack:
            for callback, context in self._each("forward_context", rows, None):
                del callback
                stack.enter_context(context)
            yield

    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        """All statistics of a finished rollout."""
        return self._merged("rollout_metrics", rollout)

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """All statistics of a microbatch."""
        return self._merged("metrics", view)

    def observe(self, rollout: Rollout) -> None:
        """Shows the finished rollout to everyone who looks."""
        for _ in self._each("observe", rollout, None):
            pass

    def observe_drawn(self, rollout: Rollout) -> None:
        """Shows what one round drew."""
        for _ in self._each("observe_drawn", rollout, None):
            pass

    def observe_update(self, view: LossView) -> None:
        """Shows a microbatch of an optimizer step."""
        for _ in self._each("observe_update", view, None):
            pass

    def _each(self, method: str, seen: Rollout, shape: str | None) -> Iterator[tuple[RLCallback, Any]]:
        for callback in self._by_method[method]:
            before = seen.versions()
            given = getattr(callback, method)(seen)
            changed = [name for name, version in seen.versions().items() if version != before[name]]
            if changed:
                raise RuntimeError(
                    f"{method} of {callback.name} wrote in place to {', '.join(changed)}: "
                    "a contribution returns a new tensor and edits nothing (use x * y, not x *= y)"
                )
            if shape is not None:
                _check(callback, method, given, seen, shape)
            yield callback, given

    def _sum(self, method: str, rollout: Rollout, shape: str) -> Tensor | None:
        total = None
        for _, given in self._each(method, rollout, shape):
            total = given.detach() if total is None else total + given.detach()
        return total

    def _merged(self, method: str, seen: Rollout) -> dict[str, Stat]:
        stats: dict[str, Stat] = {}
        for callback, given in self._each(method, seen, None):
            prefix = f"{type(callback).name or callback.name}/"  # the file's name; a twin logs under its own
            foreign = [key for key in given if not key.startswith(prefix)]
            if foreign:
                raise ValueError(f'expected {callback.name} to log under "{prefix}", got {", ".join(foreign)}')
            stats |= {f"{callback.name}/{key.removeprefix(prefix)}": stat for key, stat in given.items()}
        return stats


def _times(factor: Tensor | None, other: Tensor) -> Tensor:
    return other if factor is None else factor * other


def _check(callback: RLCallback, method: str, given: Tensor, seen: Rollout, shape: str) -> None:
    axes, kind = shape.split()
    if not isinstance(given, Tensor):
        raise TypeError(f"expected {method} of {callback.name} to return a tensor, got {type(given).__name__}")
    expected = seen.groups.shape if axes == "row" else seen.response_ids.shape
    fits_kind = given.dtype == torch.bool if kind == "mask" else given.is_floating_point()
    if given.shape != expected or not fits_kind:
        raise ValueError(
            f"expected {method} of {callback.name} to return a {'bool' if kind == 'mask' else 'float'} tensor "
            f"{list(expected)}, got {str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
        )
