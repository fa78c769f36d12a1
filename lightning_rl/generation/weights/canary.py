"""Canary: proves after every sync that the engine has the trainer's weights, by scoring a few tokens in both.

Fixed random tokens are scored, which is sensitive, and a few are drawn at the run's temperature, which tells a wrong
temperature or filter from wrong weights. Rounding explains a difference up to a threshold: measured for float32, and
calibrated at the first sync for anything coarser. In a coarse dtype one optimizer step moves a value as much as
rounding does, so an engine that did not move is found by comparing its own values bit for bit.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from lightning_rl.generation.engine import Engine, Request
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.rollout import Finish, Rollout

NOISE = 2e-5  # rounding moves a float32 log-probability by up to 1.1e-5 between engines
CEILING = 0.5  # mean difference in a coarse dtype that no rounding explains
DRAWN_ROWS, DRAWN_TOKENS = 4, 4
REMEMBERED = 4

Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


class CanaryError(RuntimeError):
    """The engine does not generate from the trainer's weights."""


@dataclass(frozen=True, slots=True)
class Values:
    """Log-probabilities of the canary's tokens by one side, float64 on the CPU: fixed [N], empty for an engine that
    cannot score, and drawn [M].
    """

    fixed: Tensor
    drawn: Tensor

    @property
    def best(self) -> Tensor:
        """The fixed ones, or the drawn ones if there are none; fixed ones compare across versions."""
        return self.fixed if len(self.fixed) else self.drawn


@dataclass(frozen=True, slots=True)
class Measured:
    """What the engine said about which rows, by the name of each copy of the weights that it has."""

    values: Mapping[str, Values]
    fixed: list[Row]
    drawn: list[Row]
    version: int


@dataclass(frozen=True, slots=True)
class Past:
    """One canary that sang, and who."""

    who: str
    engine: Values
    trainer: Values
    version: int
    checksums: tuple[int, ...]


class Canary:
    """Compares engine and trainer after a sync, and the engine with itself before.

    Its cost is that of scoring ``tokens`` tokens and drawing 4 x 4 in the engine, and of two forwards over them in the
    trainer; it is logged as ``time/canary``.

    Args:
        tokens: number of fixed tokens that are scored.
        threshold: largest difference of a log-probability when both sides compute in float32.
        factor: how many times the first sync's mean difference is still rounding in a coarser dtype.
        cache_every: a cached prompt is run after every so many syncs; the sync after it has to have dropped it.
        seed: of the fixed tokens.

    Raises:
        ValueError: if an argument is out of range.
    """

    def __init__(
        self,
        *,
        tokens: int = 64,
        threshold: float = 1e-4,
        factor: float = 5.0,
        cache_every: int = 4,
        seed: int = 0,
    ) -> None:
        if tokens < 2 or cache_every < 1 or threshold <= 0 or factor <= 1:
            raise ValueError(
                "expected tokens >= 2, cache_every >= 1, threshold > 0 and factor > 1, got "
                f"{tokens}, {cache_every}, {threshold} and {factor}"
            )
        self.tokens, self.threshold, self.factor = tokens, threshold, factor
        self.cache_every, self.seed = cache_every, seed
        self.forget()

    def forget(self) -> None:
        """Begins anew, for another engine or run."""
        self._past: dict[str, deque[Past]] = {}
        self._rounding: float | None = None
        self._syncs = 0
        self._cached = False

    def measure(self, engine: Engine, *, vocabulary: int, temperature: float, room: int) -> Measured:
        """The engine's part.

        Args:
            engine: just synced.
            vocabulary: number of token ids.
            temperature: of the run.
            room: most tokens that the model reads.

        Raises:
            CanaryError: if the engine still has a prompt from before the sync in its prefix cache.
        """
        draw = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(vocabulary, (max(self.tokens, engine.block + 9),), generator=draw).tolist()
        self._check_cache(engine, ids[: engine.block + 9], room)
        known = tuple(ids[: min(self.tokens, room - 1)])
        rows = range(min(DRAWN_ROWS, room - DRAWN_TOKENS))
        requests = [
            Request(
                prefix_ids=known[: row + 1], sample_id=-1 - row, seed=row, max_new_tokens=DRAWN_TOKENS,
                temperature=temperature,
            )
            for row in rows
        ]  # fmt: skip
        completions = engine.generate(requests, logprobs=True)
        drawn = torch.cat([cast(Tensor, completion.logprobs).double().cpu() for completion in completions])
        fixed = engine.score_copies(known) if engine.scores else {"": drawn[:0]}
        return Measured(
            {name: Values(row.double().cpu(), drawn) for name, row in fixed.items()},
            [(known[:1], known[1:])] if engine.scores else [],
            [(r.prefix_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)],
            engine.version,
        )

    def _check_cache(self, engine: Engine, prompt: Sequence[int], room: int) -> None:
        if not engine.block or len(prompt) >= room:
            return
        if self._cached and (kept := engine.cached_tokens(prompt)):
            raise CanaryError(
                f"expected the sync to version {engine.version} to reset the prefix cache, but {kept} tokens of a "
                "prompt from before it came out of the cache: they belong to older weights"
            )
        self._cached = self._syncs % self.cache_every == 0
        self._syncs += 1
        if self._cached:
            engine.cached_tokens(prompt)

    def judge(
        self,
        measured: Measured,
        trainer: Values,
        *,
        exact: bool,
        checksums: tuple[int, ...] = (),
        where: Callable[[], str] = str,
    ) -> tuple[float, float]:
        """Compares both parts and remembers them.

        Args:
            measured: the engine's part.
            trainer: the same log-probabilities by the policy.
            exact: whether both sides compute in float32.
            checksums: of the weights as sent, in the engine's dtype.
            where: says which layer differs, if it comes to that.

        Returns:
            The largest and the mean difference.

        Raises:
            CanaryError: saying what is wrong with the engine.
        """
        found: list[Tensor] = []
        for name, engine in measured.values.items():
            differences = torch.cat([(engine.fixed - trainer.fixed).abs(), (engine.drawn - trainer.drawn).abs()])
            now = Past(f"the engine at {name}" if name else "the engine", engine, trainer, measured.version, checksums)
            before = self._past.setdefault(name, deque(maxlen=REMEMBERED))
            self._check_movement(now, before[-1] if before else None, alone=len(measured.values) == 1)
            if not self.within(differences, exact=exact):
                raise CanaryError(self._diagnosis(now, before, differences, exact=exact, where=where))
            before.append(now)
            found.append(differences)
        differences = torch.cat(found)
        if self._rounding is None and not exact:
            self._rounding = float(differences.mean())
        return float(differences.max()), float(differences.mean())

    def within(self, differences: Tensor, *, exact: bool) -> bool:
        """Whether rounding explains differences of log-probabilities."""
        if exact:
            return bool(differences.max() <= self.threshold)
        return bool(differences.mean() <= self._most())

    def _most(self) -> float:
        return CEILING if self._rounding is None else max(self.factor * self._rounding, self.threshold)

    def _check_movement(self, now: Past, before: Past | None, *, alone: bool) -> None:
        """Of several copies any may have drawn, so what was drawn says nothing of this one."""
        if before is None or now.checksums == before.checksums or len(now.engine.fixed) != len(before.engine.fixed):
            return
        same = torch.equal(now.engine.fixed, before.engine.fixed)
        same = same and not (alone and not torch.equal(now.engine.drawn, before.engine.drawn))
        moved = float((now.trainer.best - before.trainer.best).abs().max()) if same else 0.0
        if moved > NOISE:
            raise CanaryError(
                f"expected {now.who} to move with the weights of version {now.version}, but its log-probabilities are "
                f"bit for bit those of version {before.version}, while the trainer's moved by up to {moved:.2g}: the "
                "sync did not reach it"
            )

    def _diagnosis(
        self, now: Past, before: Iterable[Past], differences: Tensor, *, exact: bool, where: Callable[[], str]
    ) -> str:
        found = f"they differ by up to {float(differences.max()):.2g}, {float(differences.mean()):.2g} on average"
        said = f"expected {now.who} to have the weights of version {now.version}, but "
        if len(now.engine.fixed) and self.within((now.engine.fixed - now.trainer.fixed).abs(), exact=exact):
            return (
                f"expected {now.who} to sample from the policy's distribution, and its weights agree, but the "
                f"log-probabilities of sampled tokens do not: its temperature or filter is another; {found}"
            )
        for past in reversed(list(before)) if len(now.engine.fixed) else ():
            if self.within((now.engine.fixed - past.trainer.fixed).abs(), exact=exact):
                return f"{said}it is stale: its log-probabilities are those of version {past.version}; {found}"
        limit = f"{self.threshold:.2g} at most" if exact else f"{self._most():.2g} on average"
        return f"{said}its log-probabilities are not the trainer's: {found}, where rounding explains {limit}{where()}"


@torch.no_grad()
def trainer_values(policy: nn.Module, measured: Measured, *, packed: bool) -> Values:
    """The policy's part: two forwards on every rank. Fixed tokens are scored at temperature 1, as engines do."""
    inner = policy_in(policy)
    temperature = inner.temperature
    try:
        inner.temperature = 1.0
        fixed = _scored(policy, inner, measured.fixed, packed=packed)
    finally:
        inner.temperature = temperature
    return Values(fixed, _scored(policy, inner, measured.drawn, packed=packed))


def policy_in(module: nn.Module) -> PolicyModel:
    """The policy, whatever a strategy has wrapped around it."""
    return next(part for part in module.modules() if isinstance(part, PolicyModel))


def computes_exactly(engine: Engine, model: PolicyModel, layers: Mapping[str, Tensor]) -> bool:
    """Whether engine and trainer both compute in float32 or wider, by what the trainer's layers put out."""
    dtypes = {engine.dtype or model.model.dtype, model.model.dtype, *(output.dtype for output in layers.values())}
    return dtypes <= {torch.float32, torch.float64} and not torch.is_autocast_enabled(model.model.device.type)


def _scored(policy: nn.Module, inner: PolicyModel, rows: Sequence[Row], *, packed: bool) -> Tensor:
    if not rows:
        return torch.zeros(0, dtype=torch.float64)
    rollout = _rollout(rows)
    logprobs = policy(pack(rollout, packed=packed).to(inner.model.device)).logprobs
    return logprobs.double().cpu()[rollout.valid_tokens]


def _rollout(rows: Sequence[Row]) -> Rollout:
    prompts, responses = ([torch.tensor(ids) for ids in part] for part in zip(*rows, strict=True))
    prompt, response = (nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (prompts, responses))
    lengths = torch.tensor([len(ids) for ids in responses])
    mask = torch.arange(response.shape[1]) < lengths[:, None]
    whole = torch.ones(len(rows), dtype=torch.bool)
    return Rollout(
        prompt_ids=prompt, prompt_lengths=torch.tensor([len(ids) for ids in prompts]), response_ids=response,
        response_lengths=lengths, action_mask=mask, valid_tokens=mask, groups=torch.arange(len(rows)),
        sample_ids=torch.arange(len(rows)), finish=torch.full((len(rows),), Finish.LENGTH, dtype=torch.uint8),
        policy_version=torch.zeros_like(response), trained=whole, rewarded=whole, rewards=torch.zeros(len(rows)),
    )  # fmt: skip


def canary_of(given: "Canary | bool | None") -> "Canary | None":
    """A canary of one's own for True, none for False or None, or the one given."""
    if isinstance(given, Canary):
        return given
    return Canary() if given else None
