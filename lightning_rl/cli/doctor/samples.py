"""Samples: a few answers of the policy before training, and what rewards, limits and the engine make of them."""

import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_rl.cli.doctor.finding import Finding, error, fact, warning
from lightning_rl.corrections import Corrections
from lightning_rl.data import Prompt
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import make_plan
from lightning_rl.rewards import Rewards
from lightning_rl.rollout import Finish, Rollout
from lightning_rl.rollouts.logprobs import scored

MOST_TRUNCATED, MOST_FLAT, MOST_MISSING = 0.5, 0.9, 0.1
MOST_GAP = {torch.float64: 1e-6, torch.float32: 1e-3}  # nats, mean over tokens; 0.1 for shorter types


@dataclass(frozen=True, slots=True)
class Samples:
    """Answers to the first prompts.

    Attributes:
        module: whose policy gave them.
        prompts: one for each row.
        rollout: the rows, without rewards.
        texts: the responses as rewards see them.
        seconds: it took.
        limit: seconds that a reward may take for all rows.
    """

    module: RLLightningModule
    prompts: Sequence[Prompt]
    rollout: Rollout
    texts: Sequence[str]
    seconds: float
    limit: float


def sampled(module: RLLightningModule, number: int, limit: float) -> Samples:
    """Syncs the engine and draws the groups of ``number`` prompts, whose share of the stream moves on."""
    module.sync(0)
    prompts, begin = module.prompt_stream.take(number), time.perf_counter()
    drawer = replace(
        module.collector().drawer, rewards=Rewards({"none": _nothing}), contributions=Corrections(),
        logprobs=module.engine.returns_logprobs, greedy_baseline=False,
    )  # fmt: skip
    rollout = drawer.sample(prompts, 0)
    seconds = time.perf_counter() - begin
    texts = [
        drawer.text(ids[:length].tolist())
        for ids, length in zip(rollout.response_ids, rollout.response_lengths, strict=True)
    ]
    return Samples(module, [one for one in prompts for _ in range(module.group_size)], rollout, texts, seconds, limit)


def truncation(samples: Samples) -> Iterator[Finding]:
    """Most answers end by themselves within ``max_new_tokens``."""
    rollout, most = samples.rollout, samples.module.max_new_tokens
    share = float((rollout.finish == Finish.LENGTH).double().mean())
    mean = float(rollout.response_lengths.double().mean())
    yield fact(
        "samples",
        f"{len(rollout)} in {samples.seconds:.1f} s, {mean:.1f} tokens each, {share:.0%} cut off at {most} tokens",
    )
    if share > MOST_TRUNCATED:
        yield warning(
            "samples", f"{share:.0%} of the samples do not end within max_new_tokens={most}",
            f"max_new_tokens={2 * most} or more, a prompt that asks for less, or eos_token_ids= if answers should have "
            "ended before",
        )  # fmt: skip


def rewards(samples: Samples) -> Iterator[Finding]:
    """Every reward function gives numbers, in time, and not the same for all."""
    values: dict[str, list[float | None]] = {}
    for name, function in samples.module.rewards.functions.items():
        found = yield from _rewarded(name, function, samples)
        if found is not None:
            values[name] = found
    if len(values) == len(samples.module.rewards.functions):
        yield from _spread(values, samples)


def engine_logprobs(samples: Samples) -> Iterator[Finding]:
    """The engine samples from the policy that is trained: both give a sampled token the same log-probability."""
    rollout, module = samples.rollout, samples.module
    if rollout.rollout_logprobs is None or not rollout.valid_tokens.any():
        return
    plan = make_plan(rollout, minibatches=1, token_budget=module.token_budget, packed=module.packing)
    with module.trainer.precision_plugin.forward_context():
        own = scored(
            rollout.to(module.device), plan.to(module.device), module.required_policy, None, Corrections(), old=True
        )
    gap = (own.required("old_logprobs").cpu() - rollout.rollout_logprobs).abs()[rollout.valid_tokens]
    mean, largest = float(gap.double().mean()), float(gap.max())
    yield fact("engine", f"log-probabilities differ from the trainer's by {mean:.2g} nats, {largest:.2g} at most")
    exact = str(module.trainer.precision) in ("32-true", "64-true")
    dtype = module.engine.dtype or module.required_policy.model.dtype
    bound = MOST_GAP.get(dtype, 0.1) if exact else 0.1
    if not mean <= bound:
        yield error(
            "engine", f"engine and trainer disagree by {mean:.3g} nats for each token, where {bound:g} is rounding",
            "the same model, precision and temperature on both sides; the engine must have taken the synced weights",
        )  # fmt: skip


def _rewarded(
    name: str, function: Callable[..., Any], samples: Samples
) -> Generator[Finding, None, list[float | None] | None]:
    keys = sorted({key for prompt in samples.prompts for key in prompt.columns})
    columns = {key: [prompt.columns.get(key) for prompt in samples.prompts] for key in keys}
    rows = zip(samples.rollout.response_ids, samples.rollout.response_lengths, strict=True)
    ids = [own[:length].tolist() for own, length in rows]
    contents, begin = [prompt.content for prompt in samples.prompts], time.perf_counter()
    call = _Call(lambda: list(function(contents, list(samples.texts), completion_ids=ids, **columns)))
    call.join(samples.limit)
    seconds = time.perf_counter() - begin
    if call.is_alive():
        yield error(
            "reward", f"{name} did not return within {samples.limit:g} s for {len(ids)} samples",
            "a time-out of its own around whatever it waits for, or --limit if it may take so long",
        )  # fmt: skip
        return None
    if call.raised is not None:
        yield error(
            "reward", f"{name} raised {type(call.raised).__name__}: {call.raised}",
            "a reward for every completion that a policy may write, and None where it does not apply; it is called as "
            "reward(prompts, completions, *, completion_ids, **columns)",
        )  # fmt: skip
        return None
    found = call.values
    if len(found) != len(ids):
        yield error("reward", f"{name} returned {len(found)} values for {len(ids)} samples", "one value for each")
        return None
    numbers = [float(one) for one in found if one is not None and math.isfinite(one)]
    if len(numbers) < len(found) * (1 - MOST_MISSING):
        yield warning(
            "reward", f"{name} gave no finite number for {len(found) - len(numbers)} of {len(found)} samples",
            "a finite number; None only where it does not apply",
        )  # fmt: skip
    if numbers:
        yield fact(
            "reward",
            f"{name}: mean {statistics.fmean(numbers):.3g}, deviation {statistics.pstdev(numbers):.3g}, "
            f"{1000 * seconds / len(found):.2g} ms for each sample",
        )
    return [None if one is None else float(one) for one in found]


def _spread(values: dict[str, list[float | None]], samples: Samples) -> Iterator[Finding]:
    module, groups = samples.module, samples.rollout.groups.tolist()
    weights = module.rewards.weights
    totals: dict[int, set[float]] = {}
    for row, group in enumerate(groups):
        own = [weights[name] * (given[row] or 0.0) for name, given in values.items() if weights[name]]
        totals.setdefault(group, set()).add(math.fsum(own))
    if not module.estimator.compares:
        return
    flat = sum(len(own) == 1 for own in totals.values()) / len(totals)
    yield fact("groups", f"{flat:.0%} of {len(totals)} groups have the same reward throughout")
    if flat > MOST_FLAT:
        yield warning(
            "groups", f"{flat:.0%} of the groups teach nothing, because their samples all have one reward",
            "easier or harder prompts, a reward with steps in between, a larger group_size, or DynamicSampling()",
        )  # fmt: skip


class _Call(threading.Thread):
    """Foreign code in a thread that nobody waits for at the end."""

    def __init__(self, function: Callable[[], list[Any]]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.values: list[Any] = []
        self.raised: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Calls it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.values = self.function()
        except BaseException as raised:  # noqa: BLE001  the boundary to foreign code
            self.raised = raised


def _nothing(prompts: Sequence[Any], *_: Any, **__: Any) -> list[float]:
    return [0.0] * len(prompts)
