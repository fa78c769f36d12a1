"""Checks on a few samples of the policy: rewards, length limit, and log-probabilities of the engine."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_rl.cli.doctor.findings import error, fact, warning
from lightning_rl.corrections import Corrections
from lightning_rl.module import RLLightningModule
from lightning_rl.policy import make_plan
from lightning_rl.policy.logprobs import logprob_tolerance
from lightning_rl.processes.timeouts import CLOCK, RewardTimeoutError
from lightning_rl.rewards import Rewards
from lightning_rl.rewards.reward_call import completion_form
from lightning_rl.rewards.submitted import return_alone
from lightning_rl.rollout import Rollout
from lightning_rl.rollouts.collector import reward_arguments
from lightning_rl.rollouts.failures import FailureReport
from lightning_rl.rollouts.first_sample import first_sample
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.samples import Rows, Trajectory
from lightning_rl.signal.masked import row_mean
from lightning_rl.utils.finding import Finding

MAX_TRUNCATED, MAX_FLAT, MAX_MISSING = 0.5, 0.9, 0.1


@dataclass(frozen=True, slots=True)
class CheckedSamples:
    """Completions of the first prompts.

    Attributes:
        module: Module with the policy.
        rollout: Rows without rewards.
        trajectories: Samples of the rows.
        arguments: Arguments of rewards, with the columns of an environment.
        seconds: Duration of generation in seconds.
        limit: Timeout in seconds of a reward for all rows.
    """

    module: RLLightningModule
    rollout: Rollout
    trajectories: Sequence[Trajectory]
    arguments: Rows
    seconds: float
    limit: float


def draw_samples(module: RLLightningModule, number: int, limit: float) -> CheckedSamples:
    """Sync the engine and sample the groups of ``number`` prompts, which advances the prompt stream."""
    module.run.sync(0)
    prompts, begin = module.data_module.take(number), time.perf_counter()
    nothing = Rewards({"none": lambda prompts, *_, **__: [0.0] * len(prompts)})
    collector = replace(module.run.collector, rewards=nothing, corrections=Corrections(), greedy_baseline=False)
    drawn = collector.sample(collector.open(prompts, 0), logprobs=collector.reads_logprobs(0))
    rollout, *_ = collector.reward(drawn)
    report = FailureReport()
    report.add(drawn.trajectories)
    report.write()
    seconds = time.perf_counter() - begin
    arguments = reward_arguments(drawn.trajectories, collector.texts)
    pairs = zip(arguments["prompts"], arguments["completions"], strict=True)
    arguments["completions"] = [completion_form(prompt, text) for prompt, text in pairs]
    return CheckedSamples(module, rollout, drawn.trajectories, Rows(**arguments), seconds, limit)


def first_texts(samples: CheckedSamples) -> Iterator[Finding]:
    """Show one prompt and one response with their control tokens."""
    for name, text in first_sample(samples.trajectories, samples.module.options.tokenizer):
        yield fact(name, text)


def truncation(samples: CheckedSamples) -> Iterator[Finding]:
    """Check that most responses end within ``max_new_tokens``."""
    rollout, limit = samples.rollout, samples.module.options.sampling.max_new_tokens
    share = float(rollout.truncated.double().mean())
    mean = float(rollout.sampled_lengths.double().mean())
    drawn = f"{len(rollout)} in {samples.seconds:.1f} s, {mean:.1f} tokens each"
    yield fact("samples", f"{drawn}, {share:.0%} truncated at {limit} tokens")
    if share > MAX_TRUNCATED:
        cure = (
            f"max_new_tokens={2 * limit} or more, a prompt that asks for less, or eos_token_ids= if responses should "
        )
        cure += "have ended before"
        yield warning("samples", f"{share:.0%} of the samples do not end within max_new_tokens={limit}", cure)


def rewards(samples: CheckedSamples) -> Iterator[Finding]:
    """Check that every reward function returns numbers in time, and not the same for all samples."""
    values: dict[str, list[float | None]] = {}
    for name, function in samples.module.options.rewards.by_name.items():
        numbers = yield from _reward_values(name, function, samples)
        if numbers is not None:
            values[name] = numbers
    if len(values) == len(samples.module.options.rewards.by_name):
        yield from _spread(values, samples)


def engine_logprobs(samples: CheckedSamples) -> Iterator[Finding]:
    """Check that engine and trainer compute the same log-probabilities of sampled tokens."""
    rollout, module = samples.rollout, samples.module
    if rollout.rollout_logprobs is None or not rollout.valid_tokens.any():
        return
    plan = make_plan(
        rollout,
        minibatches=1,
        max_tokens_per_microbatch=module.run.progress.max_tokens_per_microbatch,
        packed=module.models.options.packing,
    )
    with module.trainer.precision_plugin.forward_context():
        scored = add_logprobs(
            rollout.to(module.device), plan.to(module.device), module.required_policy, None, Corrections(), old=True
        )
    valid = rollout.valid_tokens
    gap = (scored.require("old_logprobs").cpu() - rollout.rollout_logprobs).abs().double().where(valid, 0.0)
    mean, largest, of_row = float(gap.sum() / valid.sum()), float(gap.max()), float(row_mean(gap, valid).max())
    yield fact("engine", f"log-probabilities differ from the trainer's by {mean:.2g} nats, {largest:.2g} at most")
    exact, engine = str(module.trainer.precision) in ("32-true", "64-true"), module.options.engine
    model = module.required_policy.model
    bound = logprob_tolerance(dtype := engine.dtype or model.dtype, exact=exact)
    own = logprob_tolerance(dtype, exact=exact, model=model if engine.capabilities.shares_policy else None)
    cure = "use one model, precision and temperature on both sides, and check that the engine loads synced weights and "
    cure += "reads pictures as the trainer does"
    if not mean <= bound:
        observed = f"engine and trainer differ by {mean:.3g} nats per token, above the rounding error of {bound:g}"
        yield error("engine", observed, cure)
    elif mean > own or of_row > 5 * own:
        observed = f"engine and trainer differ by {mean:.3g} nats per token and {of_row:.3g} in one row, beyond "
        yield warning("engine", f"{observed}rounding ({own:g}, in one row {5 * own:g})", cure)


def _reward_values(
    name: str, function: Callable[..., Any], samples: CheckedSamples
) -> Generator[Finding, None, list[float | None] | None]:
    """Call one reward function as a run would; return None if there are no values to continue with."""
    number, begin = len(samples.arguments), time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = CLOCK.run(lambda: list(return_alone(name, function, samples.arguments.copy())), samples.limit)
    except RewardTimeoutError:
        observed = f"{name} did not return within {samples.limit:g} s for {number} samples"
        yield error("reward", observed, "add a timeout to the calls that block, or raise --limit")
        return None
    except (Exception, SystemExit) as raised:  # noqa: BLE001  an error of user code is a finding
        cure = "return a reward for any completion, and None where it does not apply; the call is "
        cure += "reward(prompts, completions, *, completion_ids, **columns)"
        yield error("reward", f"{name} raised {type(raised).__name__}: {raised}", cure)
        return None
    seconds = time.perf_counter() - begin
    if len(values) != number:
        yield error("reward", f"{name} returned {len(values)} values for {number} samples", "one value for each")
        return None
    finite = [float(value) for value in values if value is not None and math.isfinite(value)]
    if len(finite) < len(values) * (1 - MAX_MISSING):
        observed = f"{name} returned no finite number for {len(values) - len(finite)} of {len(values)} samples"
        yield warning("reward", observed, "return a finite number; None only where it does not apply")
    if finite:
        statistic = f"mean {statistics.fmean(finite):.3g}, deviation {statistics.pstdev(finite):.3g}"
        yield fact("reward", f"{name}: {statistic}, {1000 * seconds / len(values):.2g} ms per sample")
    return [None if value is None else float(value) for value in values]


def _spread(values: dict[str, list[float | None]], samples: CheckedSamples) -> Iterator[Finding]:
    """Check that the samples of a prompt differ in reward, if the estimator compares them."""
    weights = samples.module.options.rewards.weights
    totals: dict[int, set[float]] = {}
    for row, group in enumerate(samples.rollout.groups.tolist()):
        parts = [weights[name] * (numbers[row] or 0.0) for name, numbers in values.items() if weights[name]]
        totals.setdefault(group, set()).add(math.fsum(parts))
    if not samples.module.algorithm.advantages.compares:
        return
    flat = sum(len(different) == 1 for different in totals.values()) / len(totals)
    yield fact("groups", f"{flat:.0%} of {len(totals)} groups have equal rewards")
    if flat > MAX_FLAT:
        observed = f"{flat:.0%} of the groups have no gradient, because the rewards of their samples are equal"
        cure = "easier or harder prompts, a reward with more values, a larger group_size, or DynamicSampling()"
        yield warning("groups", observed, cure)
