"""Corrections: calls every callback in the order of the names, checks its contributions and combines them."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_rl.corrections.call_user import VERSIONS, Guard, call_user
from lightning_rl.corrections.rl_callback import CONTRIBUTIONS, LossTerm, RLCallback
from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.trace import StepTrace
from lightning_rl.corrections.view import LossView
from lightning_rl.distributed import ALONE, Collectives
from lightning_rl.rollout import Rollout, RolloutT
from lightning_rl.samples import Completion, Request, RewardCall
from lightning_rl.signal.masked import masked_fill_invalid
from lightning_rl.signal.rounded_sum import rounded_sum
from lightning_rl.utils.arguments import check_numbers
from lightning_rl.utils.mutation_guard import Fields
from lightning_rl.utils.naming import in_words

ReturnT = TypeVar("ReturnT")
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

LOGGED_BY_CORE = {
    "exclude": ("excluded",),
    "token_reward": ("token_reward",),
    "sequence_mask": ("rejected",),
    "token_mask": ("rejected_tokens",),
    "token_weight": ("weight_mean", "ess"),
    "loss_term": ("loss",),
}


class PolicyFactor(NamedTuple):
    """Product of masks and weights on the policy loss, such as [[0.0, 2.0]], and their statistics."""

    factor: Tensor | None  # [b, T]; None without masks and weights
    stats: dict[str, Stat]


class Corrections:
    """The corrections of a run, sorted by name.

    Args:
        callbacks: RLCallbacks of the trainer, in any order.
        collectives: Operations over the ranks of the run, for the callbacks.

    Attributes:
        guard: Detects edits by user code.

    Raises:
        ValueError: If a name is empty or used twice, or several callbacks replace the reward or choose rows.
    """

    def __init__(self, callbacks: Sequence[RLCallback] = (), collectives: Collectives | None = None) -> None:
        self.callbacks = tuple(sorted(callbacks, key=lambda callback: callback.name))
        self.guard: Guard = VERSIONS
        self._step_observers: tuple[RLCallback, ...] = ()
        names = [callback.name for callback in self.callbacks]
        for callback in self.callbacks:
            if callback.name in RESERVED:
                raise ValueError(f'expected a name that the core does not log under, got "{callback.name}": rename it')
            if not callback.name:
                raise ValueError(f"expected {type(callback).__name__} to set the class attribute `name`, got none")
            if names.count(callback.name) > 1:
                raise ValueError(
                    f'expected unique names, got "{callback.name}" twice: use .with_name("another") on one'
                )
            if collectives is not None:
                callback.collectives = collectives
        offers = [(callback, callback.contributes) for callback in self.callbacks]
        self._contributors = {
            method: tuple(callback for callback, methods in offers if method in methods) for method in CONTRIBUTIONS
        }
        for method, does in (("replace_reward", "replaces the reward"), ("choose_rows", "chooses rows")):
            alone = [type(callback).__name__ for callback in self._contributors[method]]
            if len(alone) > 1:
                raise ValueError(f"expected one callback that {does}, got {in_words(alone)}: remove one")
        self._contributors["observe"] = tuple(sorted(self._contributors["observe"], key=lambda c: c.affects))

    def contributors(self, *methods: str) -> tuple[RLCallback, ...]:
        """Return the callbacks with any of the given contribution methods; see :data:`CONTRIBUTIONS`."""
        offering = {callback for method in methods for callback in self._contributors[method]}
        return tuple(callback for callback in self.callbacks if callback in offering)

    def unlogged_metrics(self) -> list[str]:
        """Return the metrics of :data:`LOGGED_BY_CORE` whose methods the callbacks do not override."""
        return [
            f"{callback.name}/{metric}"
            for callback in self.callbacks
            for method, metrics in LOGGED_BY_CORE.items()
            for metric in (() if method in callback.contributes else metrics)
        ]

    def alone(self) -> "Corrections":
        """Return copies of the callbacks without collectives."""
        return type(self)([copy.copy(callback) for callback in self.callbacks], ALONE)

    @property
    def chooser(self) -> Callable[[int], Sequence[int]] | None:
        """Function that returns the rows of a number of next prompts; None if no callback chooses rows."""
        for callback in self._contributors["choose_rows"]:
            return lambda number: self._ask(callback, "choose_rows", number, shown=lambda: ())
        return None

    def reward_mask(self, rollout: Rollout) -> Tensor:
        """Return the rows that every callback keeps in the reward, shape [B] bool."""
        combined = torch.ones(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        for _, mask in self._each("reward_mask", rollout):
            combined = combined & mask
        return combined

    def replace_reward(self, rollout: Rollout) -> Tensor | None:
        """Return the reward of the callback that replaces it, shape [B], or None."""
        return next((replacement.detach() for _, replacement in self._each("replace_reward", rollout)), None)

    def scores(self, rollout: Rollout) -> Tensor:
        """Return the reward of each row, or its replacement, plus all bonuses, shape [B], in the dtype of rewards."""
        replacement = self.replace_reward(rollout)
        rewards = masked_fill_invalid(rollout.rewards if replacement is None else replacement, rollout.rewarded)
        return rounded_sum([rewards, *self._bonuses(rollout)]).to(rollout.rewards.dtype)

    def reward_bonus(self, rollout: Rollout) -> Tensor | None:
        """Return the sum of all bonuses, shape [B], in the dtype of rewards, or None."""
        bonuses = self._bonuses(rollout)
        return rounded_sum(bonuses).to(rollout.rewards.dtype) if bonuses else None

    def keep_groups(self, rollout: Rollout) -> Tensor:
        """Return the rows of the groups that every callback keeps, shape [B] bool.

        Raises:
            ValueError: If only part of a group would be kept.
        """
        combined = torch.ones(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        for _, mask in self._each("keep_groups", rollout):
            combined = combined & mask
        partly = torch.isin(rollout.groups[combined], rollout.groups[~combined].unique())
        if partly.any():
            group = int(rollout.groups[combined][partly][0])
            raise ValueError(f"expected keep_groups to return equal values within a group, got both in group {group}")
        return combined

    def exclude(self, rollout: Rollout) -> tuple[Tensor, dict[str, Stat]]:
        """Return the rows that any callback excludes, shape [B] bool, and statistics per callback."""
        combined = torch.zeros(len(rollout), dtype=torch.bool, device=rollout.groups.device)
        stats = {}
        for callback, mask in self._each("exclude", rollout):
            stats[f"{callback.name}/excluded"] = Stat.of(mask, rollout.real)
            combined = combined | mask
        return combined, stats

    def provide(self, rollout: RolloutT) -> RolloutT:
        """Return the rollout with all provided tensors in ``extras`` and ``token_extras``."""
        fields = {"extras": dict(rollout.extras), "token_extras": dict(rollout.token_extras)}
        for callback, tensors in self._each("provide", rollout):
            if callback.provides and tensors.keys() != set(callback.provides):
                raise ValueError(
                    f"expected provide of {callback.name} to return the tensors of its `provides`, "
                    f"{sorted(callback.provides)}, got {sorted(tensors)}"
                )
            for name, tensor in tensors.items():
                field, _, key = name.partition("/")
                shape = rollout.groups.shape if field == "extras" else rollout.response_ids.shape
                if field not in fields or not key or tensor.shape[: len(shape)] != shape:
                    raise ValueError(
                        f'expected provide of {callback.name} to name its tensors "extras/..." [B, ...] or '
                        f'"token_extras/..." [B, T, ...], got "{name}" {list(tensor.shape)}'
                    )
                if key in fields[field]:
                    raise ValueError(f'expected "{name}" from one callback, got a second one from {callback.name}')
                fields[field][key] = tensor.detach()
        return rollout.replace(**fields)

    def token_reward(self, rollout: Rollout) -> tuple[Tensor | None, dict[str, Stat]]:
        """Return the sum of all token rewards, shape [B, T], or None; and statistics of KL penalties and the others."""
        rewards = {callback: reward.detach() for callback, reward in self._each("token_reward", rollout)}
        penalties = [reward for callback, reward in rewards.items() if callback.penalizes_kl]
        parts = {f"{one.name}/token_reward": reward for one, reward in rewards.items() if not one.penalizes_kl}
        if penalties:
            parts["kl/penalty"] = -sum_of(penalties)
        stats = {name: Stat.of(part, rollout.valid_tokens) for name, part in parts.items()}
        return sum_of(rewards.values()) if rewards else None, stats

    def policy_factor(self, view: LossView) -> PolicyFactor:
        """Return the product of all masks and weights, shape [b, T], and statistics before masking."""
        factor, stats = None, dict[str, Stat]()
        rejected, weights = dict[str, Tensor](), dict[str, Tensor]()
        for callback, mask in self._each("sequence_mask", view):
            stats[f"{callback.name}/rejected"] = Stat.of(~mask, view.trained)
            factor = _times(factor, mask[:, None].expand_as(view.valid_tokens).to(view.logprobs.dtype))
        for callback, mask in self._each("token_mask", view):
            rejected[f"{callback.name}/rejected_tokens"] = ~mask
            factor = _times(factor, mask.to(view.logprobs.dtype))
        for callback, weight in self._each("token_weight", view):
            if weight.requires_grad:
                raise ValueError(f"expected token_weight of {callback.name} without gradient, got one: detach it")
            weights[callback.name] = weight
            factor = _times(factor, weight)
        of_tokens = Stat.many(rejected | weights, view.valid_tokens) if rejected or weights else {}
        stats |= {name: of_tokens[name] for name in rejected}
        for name in weights:
            stats |= {f"{name}/weight_mean": of_tokens[name], f"{name}/ess": of_tokens[name].ess()}
        return PolicyFactor(factor, stats)

    def loss_terms(self, view: LossView) -> list[tuple[str, LossTerm]]:
        """Return every term with its callback's name."""
        return [(callback.name, term) for callback, term in self._each("loss_term", view)]

    @contextmanager
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        """Enter the contexts of all callbacks, nested."""
        with ExitStack() as stack:
            for callback in self._contributors["forward_context"]:
                own = rows.clone()
                who = f"forward_context of {callback.name}"
                stack.enter_context(self.guard.around(who, own.tensors, (own,)))
                context = self._ask(callback, "forward_context", own, shown=own.tensors)
                _check(callback, "forward_context", context, rows)
                stack.enter_context(context)
            yield

    def rollout_metrics(self, rollout: Rollout) -> dict[str, Stat]:
        """Return all statistics of a finished rollout."""
        return self._merge("rollout_metrics", rollout)

    def metrics(self, view: LossView) -> dict[str, Stat]:
        """Return all statistics of a microbatch."""
        return self._merge("metrics", view)

    def observe(self, rollout: Rollout) -> None:
        """Call ``observe`` of callbacks that only observe, then of corrections, which may change their coefficients."""
        for _ in self._each("observe", rollout):
            pass

    def observe_generated(self, pairs: Sequence[tuple[Request, Completion]]) -> None:
        """Call ``observe_generated`` with the requests and completions of the engine."""
        for callback in self._contributors["observe_generated"]:
            self._ask(callback, "observe_generated", tuple(pairs), shown=lambda: _pair_tensors(pairs))

    def observe_rewards(self, rollout: Rollout, calls: Sequence[RewardCall]) -> None:
        """Call ``observe_rewards`` with the samples of one round and the calls of the reward functions."""
        for _ in self._each("observe_rewards", rollout, calls):
            pass

    def traces_step(self, rollout_number: int, step: int) -> bool:
        """Return True if a callback observes the optimizer step that begins now; each of them is asked."""
        asked = self._contributors["observe_step"]
        self._step_observers = tuple(callback for callback in asked if callback.traces_step(rollout_number, step))
        return bool(self._step_observers)

    def observe_step(self, trace: StepTrace) -> None:
        """Call ``observe_step`` of every callback that observes the step, see :meth:`traces_step`."""
        for callback in self._step_observers:
            self._ask(callback, "observe_step", trace, shown=trace.tensors)

    def states(self) -> dict[str, Any]:
        """Return a copy of the callbacks' states by name, without empty ones."""
        states = copy.deepcopy({callback.name: callback.state_dict() for callback in self.callbacks})
        for callback in self.callbacks:
            vars(callback).setdefault("initial", states[callback.name])
        return {name: state for name, state in states.items() if state}

    def reset(self, states: dict[str, Any], options: Iterable[str]) -> None:
        """Give options their values of now in the states of a checkpoint, which a run is about to load.

        Args:
            states: State by name.
            options: Options that changed, such as ``adaptive_kl.beta``; a name alone is another correction than before.
        """
        initial = {callback.name: callback.initial for callback in self.callbacks}
        for path in options:
            name, _, option = path.partition(".")
            option = option.partition(".")[0]
            if not option:
                states.pop(name, None)
            elif name in states and option in initial[name]:
                states[name][option] = initial[name][option]

    def restore(self, states: Mapping[str, Any]) -> None:
        """Load :meth:`states` into the callbacks."""
        for callback in self.callbacks:
            if callback.name in states:
                callback.load_state_dict(copy.deepcopy(dict(states[callback.name])))

    def after_step(self, outputs: Mapping[str, Tensor]) -> None:
        """Let every callback adapt to an optimizer step."""
        for callback in self.callbacks:
            callback.after_step(outputs)

    def call(self, who: str, function: Callable[..., ReturnT], *args: object, shown: Callable[[], Fields]) -> ReturnT:
        """Call user code of the signal under the guard of this run; see :func:`call_user`."""
        return call_user(who, function, *args, shown=shown, guard=self.guard)

    def _ask(self, callback: RLCallback, method: str, *args: object, shown: Callable[[], Fields]) -> Any:
        return self.call(f"{method} of {callback.name}", getattr(callback, method), *args, shown=shown)

    def _each(self, method: str, seen: Rollout, *further: Any) -> Iterator[tuple[RLCallback, Any]]:
        """Yield each callback with its contribution; every callback gets its own copy of a rollout.

        So no edit by a callback, not even through ``.data`` or ``.numpy()``, changes what is logged. The tensors of a
        microbatch are already a copy.
        """
        for callback in self._contributors[method]:
            own = seen if isinstance(seen, LossView) else seen.clone()
            contribution = self._ask(callback, method, own, *further, shown=own.tensors)
            _check(callback, method, contribution, seen)
            yield callback, contribution

    def _bonuses(self, rollout: Rollout) -> list[Tensor]:
        return [bonus.detach() for _, bonus in self._each("reward_bonus", rollout)]

    def _merge(self, method: str, seen: Rollout) -> dict[str, Stat]:
        merged: dict[str, Stat] = {}
        for callback, stats in self._each(method, seen):
            prefix = f"{type(callback).name or callback.name}/"  # replaced below by the name of the instance
            foreign = [key for key in stats if not key.startswith(prefix)]
            if foreign:
                raise ValueError(f'expected {callback.name} to log under "{prefix}", got {", ".join(foreign)}')
            names = {key.removeprefix(prefix) for key in stats}
            taken = {name for offered in callback.contributes for name in LOGGED_BY_CORE.get(offered, ())}
            if names & taken:
                raise ValueError(
                    f"expected {callback.name} to log names in {method} that the core does not log for it, got "
                    f'"{prefix}{min(names & taken)}": choose another'
                )
            merged |= {f"{callback.name}/{key.removeprefix(prefix)}": stat for key, stat in stats.items()}
        return merged


def _maps_to(kind: type) -> Callable[[Any], bool]:
    """Return a check for a mapping to values of a class."""
    return lambda value: isinstance(value, Mapping) and all(isinstance(item, kind) for item in value.values())


PLAIN_RETURNS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "term": (lambda value: isinstance(value, LossTerm), "a LossTerm(per_token=..., coef=...)"),
    "tensors": (_maps_to(Tensor), 'a mapping from names such as "extras/difficulty" to tensors'),
    "stats": (_maps_to(Stat), "a mapping from names to Stat, such as Stat.of(values, mask)"),
    "context": (lambda value: isinstance(value, AbstractContextManager), "a context manager"),
}


def _pair_tensors(pairs: Sequence[tuple[Request, Completion]]) -> Fields:
    """Return the tensors of completions; names contain the sample."""
    tensors: list[tuple[str, Tensor]] = []
    for request, completion in pairs:
        extras = {"logprobs": completion.logprobs, **completion.token_extras, **completion.prompt_extras}
        named = [(f"{name} of sample {request.sample_id}", tensor) for name, tensor in extras.items()]
        tensors += [(name, tensor) for name, tensor in named if tensor is not None]
    return tensors


def sum_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, in their order."""
    return reduce(torch.add, tensors)


def _times(factor: Tensor | None, other: Tensor) -> Tensor:
    return other if factor is None else factor * other


def _check(callback: RLCallback, method: str, contribution: Any, seen: Rollout) -> None:
    """Raise an error if a contribution's type or shape differs from CONTRIBUTIONS, or a coefficient is not finite."""
    returns = CONTRIBUTIONS[method].returns
    if returns in PLAIN_RETURNS:
        fits, expected = PLAIN_RETURNS[returns]
        if not fits(contribution):
            raise TypeError(f"expected {method} of {callback.name} to return {expected}, got {contribution!r:.100}")
    if returns == "term":
        if not isinstance(contribution.coef, Tensor):
            coef = {f"coef in {method} of {callback.name}": contribution.coef}
            check_numbers(finite=True, **coef)
        contribution, returns = contribution.per_token, "token float"
    axes, _, kind = returns.partition(" ")
    if not kind:
        return
    if not isinstance(contribution, Tensor):
        raise TypeError(f"expected {method} of {callback.name} to return a tensor, got {type(contribution).__name__}")
    shape = seen.groups.shape if axes == "row" else seen.response_ids.shape
    fits_kind = contribution.dtype == torch.bool if kind == "mask" else contribution.is_floating_point()
    if contribution.shape != shape or not fits_kind:
        raise ValueError(
            f"expected {method} of {callback.name} to return a {'bool' if kind == 'mask' else 'float'} tensor "
            f"{list(shape)}, got {str(contribution.dtype).removeprefix('torch.')} {list(contribution.shape)}"
        )
