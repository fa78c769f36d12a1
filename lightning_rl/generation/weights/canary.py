"""Canary: proves after every sync that the engine has the trainer's weights, by scoring a few tokens in both.

Fixed random tokens are scored, which is sensitive, and a few are drawn at the run's temperature, which tells a wrong
temperature or filter from wrong weights. Rounding explains a difference up to a threshold: measured for float32, and
calibrated at the first sync for anything coarser, TF32 included. There one optimizer step moves a value as much as
rounding does, so an engine that did not move is found by comparing its own values bit for bit.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_rl.generation.engine import Engine, Request
from lightning_rl.generation.sampling import Sampling
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.rollout import Rollout

TOKENS = 64  # fixed ones that are scored
SEED = 0  # of the fixed tokens
DRAWN_ROWS, DRAWN_TOKENS = 4, 4
NOISE = 2e-5  # rounding moves a float32 log-probability by up to 1.1e-5 between engines
FACTOR = 5.0  # times the first sync's mean difference that is still rounding in anything coarser than float32
CACHE_EVERY = 4  # a cached prompt is run after every so many syncs; the sync after it has to have dropped it
REMEMBERED = 4  # syncs whose values tell a stale engine from a wrong one
LAYER = re.compile(r"(?:^|\.)(embed_tokens|layers\.\d+)$")

Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


class CanaryError(RuntimeError):
    """The engine does not generate from the trainer's weights."""


class Rounding(Enum):
    """The coarsest arithmetic of engine and trainer: mean difference of a log-probability that it does not explain, and
    relative difference of a layer's output that it may make.

    TF32 in attention alone makes a mean difference of up to 2e-3, measured on random models.
    """

    FLOAT32 = 0.0, 1e-3
    TF32 = 0.02, 1e-2
    HALF = 0.5, 0.1

    @property
    def ceiling(self) -> float:
        """Mean difference at the first sync that is an error."""
        return self.value[0]

    @property
    def layer(self) -> float:
        """Relative difference of a layer's output that is none."""
        return self.value[1]

    @staticmethod
    def of(dtypes: Collection[torch.dtype], *, tf32: bool) -> "Rounding":
        """Return the rounding of products in some dtypes, where those of float32 may be TF32."""
        if not set(dtypes) <= {torch.float32, torch.float64}:
            return Rounding.HALF
        return Rounding.TF32 if tf32 else Rounding.FLOAT32


@dataclass(frozen=True, slots=True)
class Values:
    """Log-probabilities of the canary's tokens by one side, float64 on the CPU: fixed [N], empty for an engine that
    cannot score, and drawn [M].
    """

    fixed: Tensor
    drawn: Tensor

    @property
    def comparable(self) -> Tensor:
        """Those of the same tokens at every version: the fixed ones, or for want of them the drawn ones."""
        return self.fixed if len(self.fixed) else self.drawn


@dataclass(frozen=True, slots=True)
class Measurement:
    """The engine's values and the rows that they are of, by the name of each copy of the weights that it has."""

    values: Mapping[str, Values]
    fixed: list[Row]
    drawn: list[Row]
    version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """The first row that was scored."""
        prompt, response = (self.fixed or self.drawn)[0]
        return prompt + response


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides after one sync, of one copy of the weights."""

    name: str
    engine: Values
    trainer: Values
    version: int
    checksums: tuple[int, ...]


class Canary:
    """Compares engine and trainer after a sync, and the engine with itself before.

    Its cost is that of scoring 64 tokens and drawing 4 x 4 in the engine, and of two forwards over them in the trainer;
    it is logged as ``time/canary``.

    Args:
        threshold: largest difference of a log-probability when both sides compute in float32; otherwise a mean
            difference that is never an error.

    Raises:
        ValueError: if ``threshold`` is not positive.
    """

    def __init__(self, *, threshold: float = 1e-4) -> None:
        if not threshold > 0:
            raise ValueError(f"expected threshold > 0, got {threshold}")
        self.threshold = threshold
        self.forget()

    def forget(self) -> None:
        """Begins anew, for another engine or run."""
        self._past: dict[str, deque[Comparison]] = {}
        self._first_mean: float | None = None  # difference that the first sync has shown
        self._syncs = 0
        self._cached = False

    def measure(self, engine: Engine, *, vocabulary: int, temperature: float, max_length: int) -> Measurement:
        """The part of an engine that has just been synced, at the run's temperature.

        Raises:
            CanaryError: if the engine still has a prompt from before the sync in its prefix cache.
        """
        generator, longer = torch.Generator().manual_seed(SEED), engine.block_size + 9
        ids = torch.randint(vocabulary, (max(TOKENS, longer),), generator=generator).tolist()
        self._check_cache(engine, ids[:longer], max_length)
        row = tuple(ids[: min(TOKENS, max_length - 1)])
        sampling = Sampling(temperature=temperature, max_new_tokens=DRAWN_TOKENS, eos_token_ids=())
        requests = [
            Request(prefix_ids=row[: number + 1], sample_id=-1 - number, seed=number, sampling=sampling)
            for number in range(min(DRAWN_ROWS, max_length - DRAWN_TOKENS))
        ]
        completions = engine.generate(requests, logprobs=True)
        drawn = torch.cat([cast(Tensor, completion.logprobs).double().cpu() for completion in completions])
        scores = engine.capabilities.scores
        fixed = engine.score_copies(row) if scores else {"": drawn[:0]}
        return Measurement(
            {name: Values(logprobs.double().cpu(), drawn) for name, logprobs in fixed.items()},
            [(row[:1], row[1:])] if scores else [],
            [(r.prefix_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)],
            engine.version,
        )

    def _check_cache(self, engine: Engine, prompt: Sequence[int], max_length: int) -> None:
        if not engine.block_size or len(prompt) >= max_length:
            return
        if self._cached and (cached := engine.count_cached_tokens(prompt)):
            raise CanaryError(
                f"expected the sync to version {engine.version} to reset the prefix cache, but {cached} tokens of a "
                "prompt from before it came out of the cache: they belong to older weights"
            )
        self._cached = self._syncs % CACHE_EVERY == 0
        self._syncs += 1
        if self._cached:
            engine.count_cached_tokens(prompt)

    def judge(
        self,
        measurement: Measurement,
        trainer: Values,
        *,
        rounding: Rounding,
        checksums: tuple[int, ...] = (),
        where: Callable[[], str] = str,
    ) -> tuple[float, float]:
        """Compares both parts and remembers them.

        Args:
            measurement: the engine's part.
            trainer: the same log-probabilities by the policy.
            rounding: of engine and trainer.
            checksums: of the weights as sent, in the engine's dtype.
            where: says which layer differs, if it comes to that.

        Returns:
            The largest and the mean difference.

        Raises:
            CanaryError: saying what is wrong with the engine.
        """
        gaps: list[Tensor] = []
        for url, engine in measurement.values.items():
            gap = torch.cat([(engine.fixed - trainer.fixed).abs(), (engine.drawn - trainer.drawn).abs()])
            name = f"the engine at {url}" if url else "the engine"
            now = Comparison(name, engine, trainer, measurement.version, checksums)
            past, alone = self._past.setdefault(url, deque(maxlen=REMEMBERED)), len(measurement.values) == 1
            self._check_movement(now, list(past)[-1:], alone=alone)
            if not self.within(gap, rounding):
                raise CanaryError(self._diagnosis(now, past, gap, rounding, where=where))
            self._check_movement(now, list(past)[:-1], alone=alone)  # a stale engine within rounding
            past.append(now)
            gaps.append(gap)
        gap = torch.cat(gaps)
        if self._first_mean is None and rounding is not Rounding.FLOAT32:
            self._first_mean = float(gap.mean())
        return float(gap.max()), float(gap.mean())

    def within(self, gap: Tensor, rounding: Rounding) -> bool:
        """Whether rounding explains differences of log-probabilities."""
        if rounding is Rounding.FLOAT32:
            return bool(gap.max() <= self.threshold)
        return bool(gap.mean() <= self._max_mean(rounding))

    def _max_mean(self, rounding: Rounding) -> float:
        measured = rounding.ceiling if self._first_mean is None else FACTOR * self._first_mean
        return max(measured, self.threshold)

    def _check_movement(self, now: Comparison, past: Iterable[Comparison], *, alone: bool) -> None:
        """Of several copies any may have drawn, so what was drawn says nothing of this one."""
        for before in past:
            if now.checksums == before.checksums or len(now.engine.fixed) != len(before.engine.fixed):
                continue
            same = torch.equal(now.engine.fixed, before.engine.fixed)
            same = same and not (alone and not torch.equal(now.engine.drawn, before.engine.drawn))
            moved = float((now.trainer.comparable - before.trainer.comparable).abs().max()) if same else 0.0
            if moved > NOISE:
                raise CanaryError(
                    f"expected {now.name} to move with the weights of version {now.version}, but its log-probabilities "
                    f"are bit for bit those of version {before.version}, while the trainer's moved by up to "
                    f"{moved:.2g}: the sync did not reach it"
                )

    def _diagnosis(
        self, now: Comparison, past: Iterable[Comparison], gap: Tensor, rounding: Rounding, *, where: Callable[[], str]
    ) -> str:
        size = f"they differ by up to {float(gap.max()):.2g}, {float(gap.mean()):.2g} on average"
        expected = f"expected {now.name} to have the weights of version {now.version}, but "
        if len(now.engine.fixed) and self.within((now.engine.fixed - now.trainer.fixed).abs(), rounding):
            return (
                f"expected {now.name} to sample from the policy's distribution, and its weights agree, but the "
                f"log-probabilities of sampled tokens do not: its temperature or filter is another; {size}"
            )
        for before in reversed(list(past)) if len(now.engine.fixed) else ():
            if self.within((now.engine.fixed - before.trainer.fixed).abs(), rounding):
                return f"{expected}it is stale: its log-probabilities are those of version {before.version}; {size}"
        exact = rounding is Rounding.FLOAT32
        limit = f"{self.threshold:.2g} at most" if exact else f"{self._max_mean(rounding):.2g} on average"
        return (
            f"{expected}its log-probabilities are not the trainer's: {size}, where rounding explains {limit}{where()}"
        )


def canary_of(canary: Canary | bool | None) -> Canary | None:  # noqa: FBT001  an option of every engine
    """A new canary for True, none for False or None, or the very one that an engine was constructed with."""
    if isinstance(canary, Canary):
        return canary
    return Canary() if canary else None


@torch.no_grad()
def trainer_values(policy: nn.Module, measurement: Measurement, *, packed: bool) -> Values:
    """The policy's part: two forwards on every rank. Fixed tokens are scored at temperature 1, as engines do."""
    inner = policy_in(policy)
    temperature = inner.temperature

    def logprobs(rows: Sequence[Row]) -> Tensor:
        if not rows:
            return torch.zeros(0, dtype=torch.float64)
        prompts, responses = zip(*rows, strict=True)
        rollout = Rollout.of_samples(prompts, responses, groups=range(len(rows)))
        scores = policy(pack(rollout, packed=packed).to(inner.model.device)).logprobs
        return scores.double().cpu()[rollout.valid_tokens]

    try:
        inner.temperature = 1.0
        fixed = logprobs(measurement.fixed)
    finally:
        inner.temperature = temperature
    return Values(fixed, logprobs(measurement.drawn))


def policy_in(module: nn.Module) -> PolicyModel:
    """The policy, whatever a strategy has wrapped around it."""
    return next(part for part in module.modules() if isinstance(part, PolicyModel))


def rounding_between(engine: Engine, model: PolicyModel, layers: Mapping[str, Tensor]) -> Rounding:
    """Return the coarsest rounding of engine and trainer, by settings and by what the trainer's layers put out."""
    device = model.model.device.type
    dtypes = {engine.dtype or model.model.dtype, model.model.dtype, *(output.dtype for output in layers.values())}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    tf32 = backend.matmul.fp32_precision not in ("none", "ieee")  # torch.set_float32_matmul_precision sets both
    return Rounding.of(dtypes, tf32=tf32 or engine.allows_tf32)


@contextmanager
def capturing_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """What the embedding and every layer of a decoder put out at the first forward inside, as it is, by short names."""
    outputs: dict[str, Tensor] = {}

    def capture(name: str, _module: nn.Module, _input: Any, output: Any) -> None:
        # vLLM's layers return what they add and the stream that it is added to
        parts = [part for part in output if part is not None] if isinstance(output, tuple) else [output]
        if name not in outputs and parts:
            stream = sum(part.detach().double() for part in parts[:2]) if len(parts) == 2 else parts[0].detach()
            outputs[name] = torch.as_tensor(stream).flatten(0, -2)

    layers = [(part, match[1]) for name, part in model.named_modules() if (match := LAYER.search(name))]
    handles = [part.register_forward_hook(partial(capture, short)) for part, short in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def first_difference(engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor], rounding: Rounding) -> str:
    """The first layer that differs, as a part of a sentence; nothing if no layer can be compared.

    Example:
        >>> same, other = torch.ones(3, 2), torch.zeros(3, 2)
        >>> exact, trainer = Rounding.FLOAT32, {"layers.0": same, "layers.1": same}
        >>> first_difference({"layers.0": same, "layers.1": other}, trainer, exact)
        '; the first part that differs is layers.1'
        >>> first_difference({"layers.0": same}, trainer, exact)
        '; every layer agrees, so it is the final norm or the head'
    """
    compared = 0
    for name, trained in trainer.items():
        served = engine.get(name)
        tokens = 0 if served is None else min(len(served), len(trained))
        if served is None or not tokens or served.shape[1:] != trained.shape[1:]:
            continue
        compared += 1
        expected = trained[:tokens].double().cpu()
        distance = (served[:tokens].double().cpu() - expected).norm() / expected.norm().clamp(min=1e-30)
        if not distance <= rounding.layer:
            return f"; the first part that differs is {name}"
    return "; every layer agrees, so it is the final norm or the head" if compared else ""
