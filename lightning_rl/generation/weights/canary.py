"""Check after every sync that the engine has the trainer's weights, by comparing log-probabilities of a few tokens.

Fixed random tokens are scored, and a few are sampled at the run's temperature, which tells a wrong temperature or
filter from wrong weights; so are a few after a picture, if the run reads pictures. The limit of a difference is
calibrated at the first sync, because rounding grows with the model, and is never above that of the first sync, which a
precision has in any model. An optimizer step may change a value no more than rounding does, so a stale engine is found
by comparing its own values bit for bit.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_rl.generation.engine import Engine
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.expert_routes import count_experts, count_unvisited_experts
from lightning_rl.policy.processor import PROBE, PictureProcessor
from lightning_rl.rollout import TOP_IDS, TOP_LOGPROBS, Rollout
from lightning_rl.samples import PROMPT, Request, SamplingParams, Trajectory
from lightning_rl.utils.arguments import check_counts

SEED = 0  # seed of the fixed tokens
DRAWN_ROWS, DRAWN_TOKENS = 4, 4
NOISE = 2e-5  # rounding moves a float32 log-probability by up to 1.1e-5 between engines
SPREAD = 10.0  # largest difference over the mean that rounding in float32 explains; 5 to 9 measured
FACTOR = 5.0  # multiple of the first sync's difference that counts as rounding
REMEMBERED = 4  # past syncs whose values tell a stale engine from a wrong one

AFTER_SLEEP = (
    "it agreed before it slept: if it agrees with VLLMEngine(sleeps=False), vLLM has discarded a constant of the model "
    "that no sync sends"
)
Row = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and response


class CanaryError(RuntimeError):
    """The engine does not generate from the trainer's weights."""


class Rounding(Enum):
    """Lowest precision of engine and trainer: limit for the difference of log-probabilities in any model.

    In float32 a difference of 1e-3 is above rounding (1.1e-5 on random models of two layers, 5e-5 on a model of 135
    million parameters) and below those of wrong weights. TF32 in attention alone causes a mean difference of up to
    2e-3, measured on random models.
    """

    FLOAT32 = 1e-3
    TF32 = 0.02
    HALF = 0.5

    def size(self, gap: Tensor) -> float:
        """Return the size of differences: their mean, in float32 their maximum or :data:`SPREAD` times their mean.

        The maximum finds one wrong row of an embedding; the mean, which varies less, finds small errors everywhere.
        """
        mean = float(gap.mean())
        return max(float(gap.max()), SPREAD * mean) if self is Rounding.FLOAT32 else mean

    @staticmethod
    def of(dtypes: Collection[torch.dtype], *, tf32: bool) -> "Rounding":
        """Return the rounding of matrix products in these dtypes; ``tf32`` if those of float32 may use TF32."""
        if not {*dtypes} <= {torch.float32, torch.float64}:
            return Rounding.HALF
        return Rounding.TF32 if tf32 else Rounding.FLOAT32


@dataclass(frozen=True, slots=True)
class Values:
    """Log-probabilities of one side, float64 on the CPU: fixed tokens [N], if they are scored, and drawn ones [M].

    After them come those drawn after a picture [K], if the run reads pictures.

    Those of the trainer have the KL of the engine's likeliest tokens and the rest [M], if the engine records them, and
    the number of experts that no token visits, by router.
    """

    fixed: Tensor
    drawn: Tensor
    pictured: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    kl: Tensor | None = None
    unvisited: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measurement:
    """Values of the engine by copy of its weights, and the rows they belong to."""

    values: Mapping[str, Values]
    fixed: list[Row]
    drawn: list[Row]
    version: int
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # likeliest tokens before each drawn one, [rows, L, k]
    sleeps: bool = False  # the engine releases its memory between syncs
    pictures: Rollout | None = None  # row that was drawn after a picture

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the first row."""
        prompt, response = (self.fixed or self.drawn)[0]
        return prompt + response


@dataclass(frozen=True, slots=True)
class Comparison:
    """Values of both sides after a sync, for one copy of the weights."""

    name: str
    engine: Values
    trainer: Values
    version: int
    checksums: tuple[int, ...]


class Canary:
    """Compare engine and trainer after a sync, and the engine with itself at earlier syncs.

    The engine scores 64 tokens and samples 4 x 4, and the trainer runs two forwards over them, and one over 4 tokens
    after a picture if the run reads pictures; logged as ``time/canary``. Where the engine records its likeliest tokens,
    their distributions are compared, too. Experts that no token visits are a warning at the first sync.

    Args:
        tokens: Number of tokens that are scored, at most the context window.
        threshold: Size of differences that is never an error: the largest difference, and ten times the mean, if both
            sides compute in float32; otherwise the mean.

    Raises:
        ValueError: If ``threshold`` or ``tokens`` is not positive.
    """

    def __init__(self, *, tokens: int = 64, threshold: float = 1e-4) -> None:
        check_counts(1, tokens=tokens)
        if not threshold > 0:
            raise ValueError(f"expected threshold > 0, got {threshold}")
        self.tokens, self.threshold = tokens, threshold
        self.forget()

    def forget(self) -> None:
        """Reset the state, for another engine or run."""
        self._past: dict[str, deque[Comparison]] = {}
        self._first: float | None = None  # size of the differences at the first sync

    def measure(
        self,
        engine: Engine,
        *,
        vocabulary: int,
        temperature: float,
        max_length: int,
        processor: PictureProcessor | None = None,
    ) -> Measurement:
        """Return the values of an engine that was just synced.

        Args:
            engine: Engine.
            vocabulary: Number of token ids.
            temperature: Temperature of the run.
            max_length: Maximum length of prompt and response together.
            processor: Processor of the policy's pictures; None for text.
        """
        ids = torch.randint(vocabulary, (self.tokens,), generator=torch.Generator().manual_seed(SEED)).tolist()
        row = tuple(ids[: max_length - 1])
        sampling = SamplingParams(temperature=temperature, max_new_tokens=DRAWN_TOKENS, eos_token_ids=())
        requests = [
            Request(prefix_ids=row[: number + 1], sample_id=-1 - number, seed=number, sampling=sampling)
            for number in range(min(DRAWN_ROWS, max_length - DRAWN_TOKENS))
        ]
        prompts = [] if processor is None else [processor.prompt([PROBE])]
        opened = [
            Trajectory(
                prompt=prompt, request=Request.of(prompt, sample_id=-1 - DRAWN_ROWS, seed=SEED, sampling=sampling)
            )
            for prompt in prompts
            if len(prompt.token_ids) + DRAWN_TOKENS <= max_length
        ]
        answers = engine.generate([*requests, *(each.request for each in opened)], logprobs=True)
        completions, pictured = answers[: len(requests)], answers[len(requests) :]
        drawn, after = (
            torch.cat([torch.zeros(0), *(cast(Tensor, each.logprobs).cpu() for each in some)]).double()
            for some in (completions, pictured)
        )
        scores = engine.capabilities.scores
        fixed = engine.score_copies(row) if scores else {"": drawn[:0]}
        return Measurement(
            {name: Values(logprobs.double().cpu(), drawn, after) for name, logprobs in fixed.items()},
            [(row[:1], row[1:])] if scores else [],
            [(r.prefix_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)],
            engine.version,
            {
                name: torch.stack([completion.token_extras[name] for completion in completions])
                for name in sorted({TOP_IDS, TOP_LOGPROBS} & engine.extras)
            },
            engine.capabilities.sleeps,
            Rollout.of([each.extend(PROMPT, (), answer) for each, answer in zip(opened, pictured, strict=True)])
            if opened
            else None,
        )

    def judge(
        self,
        measurement: Measurement,
        trainer: Values,
        *,
        rounding: Rounding,
        checksums: tuple[int, ...] = (),
    ) -> tuple[float, float]:
        """Compare engine and trainer, and store the comparison.

        Args:
            measurement: Values of the engine.
            trainer: Log-probabilities of the same tokens under the policy.
            rounding: Rounding of engine and trainer.
            checksums: Checksums of the sent weights, in the engine's dtype.

        Returns:
            The largest and the mean difference.

        Raises:
            CanaryError: If rounding does not explain a difference; describes the fault of the engine.
        """
        gaps: list[Tensor] = []
        if not self._past and trainer.unvisited:
            warn_of_unvisited_experts(trainer.unvisited, self.tokens)
        for url, engine in measurement.values.items():
            text = torch.cat([engine.fixed - trainer.fixed, engine.drawn - trainer.drawn]).abs()
            gap = torch.cat([text, (engine.pictured - trainer.pictured).abs()])
            name = f"the engine at {url}" if url else "the engine"
            now = Comparison(name, engine, trainer, measurement.version, checksums)
            past = self._past.setdefault(url, deque(maxlen=REMEMBERED))
            self._check_movement(now, past, alone=len(measurement.values) == 1)
            if not self.within(gap, rounding):
                advice = f"; {AFTER_SLEEP}" if measurement.sleeps and past else ""
                only_pictures = len(engine.pictured) and self.within(text, rounding)
                raise CanaryError(
                    _of_pictures(now, gap) if only_pictures else self._diagnosis(now, past, gap, rounding) + advice
                )
            if trainer.kl is not None and not self._explains_kl(trainer.kl, rounding):
                raise CanaryError(
                    f"expected {now.name} to sample from the policy's distribution, and the log-probabilities of "
                    f"sampled tokens agree, but the KL over its likeliest tokens is up to {float(trainer.kl.max()):.2g}"
                )
            past.append(now)
            gaps.append(gap)
        gap = torch.cat(gaps)
        self._first = rounding.size(gap) if self._first is None else self._first
        return float(gap.max()), float(gap.mean())

    def within(self, gap: Tensor, rounding: Rounding) -> bool:
        """Return True if rounding explains differences of log-probabilities."""
        return rounding.size(gap) <= self._limit(rounding)

    def _limit(self, rounding: Rounding) -> float:
        measured = rounding.value if self._first is None else min(FACTOR * self._first, rounding.value)
        return max(measured, self.threshold)

    def _explains_kl(self, kl: Tensor, rounding: Rounding) -> bool:
        """Return True if rounding explains a KL; in float32 it is of second order, so its limit is not calibrated."""
        if rounding is Rounding.FLOAT32:
            return bool(kl.max() <= self.threshold)
        return bool(kl.mean() <= self._limit(rounding))

    def _check_movement(self, now: Comparison, past: Iterable[Comparison], *, alone: bool) -> None:
        """Raise if the engine's values did not change with the weights; drawn tokens count only with a single copy."""
        for before in reversed(list(past)):
            if now.checksums == before.checksums or len(now.engine.fixed) != len(before.engine.fixed):
                continue
            same = torch.equal(now.engine.fixed, before.engine.fixed)
            same = same and not (alone and not torch.equal(now.engine.drawn, before.engine.drawn))
            side = "fixed" if len(now.engine.fixed) else "drawn"
            moved = float((getattr(now.trainer, side) - getattr(before.trainer, side)).abs().max()) if same else 0.0
            if moved > NOISE:
                raise CanaryError(
                    f"expected {now.name} to move with the weights of version {now.version}, but its log-probabilities "
                    f"are bit for bit those of version {before.version}, while the trainer's moved by up to "
                    f"{moved:.2g}: the sync did not reach it"
                )

    def _diagnosis(self, now: Comparison, past: Iterable[Comparison], gap: Tensor, rounding: Rounding) -> str:
        size = f"they differ by up to {float(gap.max()):.2g}, {float(gap.mean()):.2g} on average"
        expected = f"expected {now.name} to have the weights of version {now.version}, but "
        if len(now.engine.fixed) and self.within((now.engine.fixed - now.trainer.fixed).abs(), rounding):
            return (
                f"expected {now.name} to sample from the policy's distribution, and its weights agree, but the "
                f"log-probabilities of sampled tokens do not: its temperature or filter differs; {size}"
            )
        for before in reversed(list(past)) if len(now.engine.fixed) else ():
            if self.within((now.engine.fixed - before.trainer.fixed).abs(), rounding):
                if now.checksums and now.checksums == before.checksums:
                    return (
                        f"expected the trainer to score as with version {before.version}, whose weights have the same "
                        f"checksums, but only {now.name} does: the trainer's weights changed in memory after they were "
                        f"sent, or its forward changed; {size}"
                    )
                return f"{expected}it is stale: its log-probabilities are those of version {before.version}; {size}"
        limit = self._limit(rounding)
        explained = f"{limit:.2g} on average"
        if rounding is Rounding.FLOAT32:
            explained = f"{limit:.2g} at most and {limit / SPREAD:.2g} on average"
        return f"{expected}its log-probabilities are not the trainer's: {size}, where rounding explains {explained}"


def _of_pictures(now: Comparison, gap: Tensor) -> str:
    return (
        f"expected {now.name} to read pictures as training does, and it agrees on text, but its log-probabilities "
        f"after a picture differ by up to {float(gap.max()):.2g}: the weights of its towers, positions or "
        "its processor are others; compare the versions of transformers and the files of the processor"
    )


def warn_of_unvisited_experts(experts: Mapping[str, int], tokens: int) -> None:
    """Warn of the experts that no token of the canary visits, given by router."""
    router, number = max(experts.items(), key=lambda item: item[1])
    rank_zero_warn(
        f"no token of the canary visits {sum(experts.values())} of the experts, {number} of them at {router}: their "
        f"weights in the engine stay unproven; Canary(tokens={4 * tokens}) visits more"
    )


def canary_of(canary: Canary | bool | None) -> Canary | None:  # noqa: FBT001  an option of every engine
    """Return a new canary for True, None for False or None, and a given canary as it is."""
    if isinstance(canary, Canary):
        return canary
    return Canary() if canary else None


@torch.no_grad()
def trainer_values(policy: nn.Module, measurement: Measurement, *, packed: bool) -> Values:
    """Return the policy's values after two forwards on every rank. Fixed tokens are scored at temperature 1."""
    inner = policy_in(policy)
    temperature = inner.temperature

    def rollout_of(rows: Sequence[Row], extras: Mapping[str, Tensor]) -> Rollout | None:
        if not rows:
            return None
        prompts, responses = zip(*rows, strict=True)
        return Rollout.of_samples(prompts, responses, groups=range(len(rows))).replace(token_extras=extras)

    def scores(rollout: Rollout | None) -> tuple[Tensor, Tensor | None]:
        if rollout is None:
            return torch.zeros(0, dtype=torch.float64), None
        outputs = policy(pack(rollout, packed=packed).to(inner.model.device))
        valid, kl = rollout.valid_tokens, outputs.rollout_kl
        return outputs.logprobs.double().cpu()[valid], None if kl is None else kl.double().cpu()[valid]

    with count_experts(inner.model) as counts:
        try:
            inner.temperature = 1.0
            fixed, _ = scores(rollout_of(measurement.fixed, {}))
        finally:
            inner.temperature = temperature
        drawn, kl = scores(rollout_of(measurement.drawn, measurement.extras))
        pictured, _ = scores(measurement.pictures)
    return Values(fixed, drawn, pictured, kl, count_unvisited_experts(counts))


def policy_in(module: nn.Module) -> PolicyModel:
    """Return the policy inside the wrappers of a strategy."""
    return next(part for part in module.modules() if isinstance(part, PolicyModel))


def rounding_between(engine: Engine, model: PolicyModel, dtype: torch.dtype) -> Rounding:
    """Return the rounding of engine and trainer, from settings and the dtype in which the trainer computes."""
    backend: Any = torch.backends.cuda if model.model.device.type == "cuda" else torch.backends.mkldnn
    tf32 = backend.matmul.fp32_precision not in ("none", "ieee")  # torch.set_float32_matmul_precision sets both
    dtypes = {engine.dtype or model.model.dtype, model.model.dtype, dtype}
    return Rounding.of(dtypes, tf32=tf32 or engine.allows_tf32)
