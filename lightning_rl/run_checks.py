"""Checks that options, corrections, engine and data of a run fit together, before its models are built.

The checks read constructor arguments alone, so every rank finds the same problems before weights are loaded.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence

from lightning_rl.advantages import ESTIMATORS, Estimator
from lightning_rl.corrections import (
    CONTRIBUTIONS,
    MADE_AFTER,
    POLICY_LOSS_FACTORS,
    ROW_REWARDS,
    TOKEN_REWARDS,
    Corrections,
    LossView,
    RLCallback,
    outputs_from,
)
from lightning_rl.distributed import Parallel
from lightning_rl.environments import EnvironmentReward
from lightning_rl.evaluation.evaluation import evaluations_of
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.generation.sampling_params import filter_problems, temperature_problems
from lightning_rl.losses import LOSSES, PolicyLoss
from lightning_rl.monitors import RunNames
from lightning_rl.options import Options
from lightning_rl.policy import ModelOptions
from lightning_rl.policy.attention import choose_attention, hardware_of
from lightning_rl.policy.liger import has_liger
from lightning_rl.policy.processor import processor_of
from lightning_rl.rollout import (
    GREEDY_SCORE,
    ROLES,
    ROUTES,
    SAMPLING_MASK,
    SUM_PI_SQUARED,
    TOP_IDS,
    TOP_LOGPROBS,
    Rollout,
)
from lightning_rl.signal.reductions import token_mean

Problems = Iterator[str]
TOP = {TOP_IDS, TOP_LOGPROBS}  # an engine records both or none


def check_run(
    options: Options, corrections: Corrections, parallel: Parallel, *, prompts_per_rollout: int | None
) -> None:
    """Run all checks; raise one ValueError that lists all problems.

    Args:
        options: Options of the module.
        corrections: Corrections among the callbacks.
        parallel: Strategy.
        prompts_per_rollout: Number of prompts per rollout on all ranks; None outside of a fit.
    """
    problems = [
        *check_kernels(options.model, parallel),
        *check_consistency(options.model, options.engine),
        *check_ratios(options, corrections),
        *check_pairs(corrections),
        *check_estimator(options, corrections),
        *check_turn_rewards(options, corrections),
        *check_reads(options, corrections),
        *check_filters(options),
        *check_pictures(options),
    ]
    if prompts_per_rollout is not None:
        check_reference(options, corrections)
        problems += check_extras(options, corrections)
        problems += check_pipelining(options, corrections)
        problems += check_sizes(prompts_per_rollout, options.minibatches_per_rollout, parallel.ranks)
    check_reduction(options)
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise ValueError("\n".join([f"{len(problems)} problems:", *(f"* {problem}" for problem in problems)]))


def needed_extras(corrections: Corrections, sampling: SamplingParams) -> dict[str, str]:
    """Return the extras that a run needs of each token, with the name of the user of each."""
    needed = {name: type(callback).__name__ for callback in corrections.callbacks for name in callback.records}
    if sampling.filters:
        needed[SAMPLING_MASK] = f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}"
    return needed


def run_names(options: Options, corrections: Corrections, *, validation: bool) -> RunNames:
    """Return the names of which the metrics of a fit consist."""
    evaluations = [one for one in evaluations_of(options.evaluation) if "val" in one.stages]
    parts = {name: options[name] for name in ("environment", "critic", "max_staleness")}
    return RunNames(
        placeholders={
            "<function>": options.rewards.sources,
            "<callback>": [callback.name for callback in corrections.callbacks],
            "<name>": [evaluation.name for evaluation in evaluations],
        },
        lacking=[name for name, part in {**parts, "validation": validation}.items() if not part],
        shares=[f"val/{one.name}/{share}" for one in evaluations for share in one.shares],
        unlogged=corrections.unlogged_metrics(),
        rising=[name for name, (_, weight) in options.rewards.sources.items() if weight > 0],
    )


def check_kernels(model: ModelOptions, parallel: Parallel) -> Problems:
    """Yield a problem if device, packages or strategy do not support the kernels."""
    device = parallel.strategy.root_device
    try:
        choose_attention(model.attention, hardware_of(device), None)
    except ValueError as unsupported:
        yield str(unsupported)
    if model.liger and device.type != "cuda":
        yield f"expected a GPU for liger=True, got {device.type}: remove it"
    elif model.liger and not has_liger():
        yield (
            "expected liger-kernel to be installed for liger=True, got an environment without it: "
            'pip install "lightning-rl[liger]", or remove it'
        )
    if model.compile and not parallel.compiles:
        name = type(parallel.strategy).__name__
        yield (
            f"expected a strategy that supports compile=, got {name}, which splits the parts of a layer: use one "
            'device, "ddp", or "fsdp2" without tensor parallelism, or remove it'
        )


def check_consistency(model: ModelOptions, engine: Engine) -> Problems:
    """Yield a problem if the engine does not decode with the trainer's operations."""
    if model.bitwise and not engine.capabilities.shares_policy:
        yield (
            'expected the embedded engine for consistency="bitwise", got '
            f"{type(engine).__name__}, which has other kernels: remove engine=, or remove consistency="
        )


def check_pictures(options: Options) -> Problems:
    """Yield a problem if a part of the run reads no pictures, given a processor of the policy."""
    if processor_of(options.tokenizer) is None:
        return
    if not options.engine.capabilities.pictures:
        name = type(options.engine).__name__
        yield f"expected an engine that reads pictures, got {name}: pass engine=TransformersEngine(), or a tokenizer"
    if options.model.bitwise:
        yield 'expected a policy of text alone for consistency="bitwise", got a processor: remove consistency='
    if options.critic is not None and options.critic.source != "shared":
        yield 'expected critic="shared" for a policy that reads pictures, got another model: pass critic="shared"'


def check_ratios(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem if the importance ratios of loss and weights count one policy twice."""
    loss, weights = options.loss, corrections.contributors("token_weight")
    factors = [(_script_name("loss", loss, LOSSES), loss.ratio, None)]
    centering = _centering(corrections)
    if centering and loss.ratio is not None and loss.ratio[1] == "rollout":
        yield (
            f"expected a loss without a ratio to the rollout policy beside {type(centering[0]).__name__}, got "
            f"{factors[0][0]}, which would count it twice: remove one of them"
        )
    factors += [(type(weight).__name__, weight.ratio, weight.alternative) for weight in weights]
    for number, (name, ratio, alternative) in enumerate(factors):
        for other, other_ratio, _ in factors[:number]:
            if ratio is None or other_ratio is None:
                continue
            for place, side in enumerate(("numerator", "denominator")):
                if ratio[place] == other_ratio[place]:
                    cure = f": use {alternative} instead" if alternative else ": leave one of them out"
                    if alternative and other_ratio[1] == "rollout":  # every ratio to the rollout policy counts it twice
                        cure = f": leave {name} out; a mask such as SequenceRatioMask carries no ratio"
                    yield (
                        f"{name} carries the ratio {ratio[0]}/{ratio[1]} and {other} "
                        f"{other_ratio[0]}/{other_ratio[1]}, so the {ratio[place]} policy would count twice as "
                        f"{side}{cure}"
                    )
                    break


def check_reduction(options: Options) -> None:
    """Warn of one ratio per response whose clipped loss would weight long responses more."""
    if options.loss.per_response and options.reduction is token_mean:
        warnings.warn(
            f"{options.loss.name} has one ratio per response, and reduction='token_mean' weights responses by "
            "length: use reduction='sequence_mean', or SequenceSumNorm(1) to weight them by length on purpose",
            stacklevel=2,
        )


def check_pairs(corrections: Corrections) -> Problems:
    """Yield a problem if a correction replaces another one, or has no effect beside it."""
    callbacks = corrections.callbacks
    present = {type(callback).name: type(callback).__name__ for callback in callbacks}
    for callback in callbacks:
        name = type(callback).__name__
        for other in sorted(set(callback.idle_beside) & present.keys()):
            yield (
                f"expected {name} or {present[other]}, got both: {name} has no effect beside {present[other]}; remove "
                "one of them"
            )
        for replaced in sorted(set(callback.replaces) & present.keys()):
            yield (
                f"expected {name} instead of {present[replaced]}, got both, which would count twice: remove "
                f"{present[replaced]}"
            )


def check_estimator(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem if the estimator cannot use token rewards, critic or groups."""
    estimator, corrections = options.advantages, corrections
    chosen = _script_name("advantages", estimator, ESTIMATORS)
    for callback in () if estimator.per_token else corrections.contributors(*TOKEN_REWARDS):
        cure = f"{callback.alternative}, or " if callback.alternative else ""
        yield (
            f"{type(callback).__name__} returns a reward per token, but {chosen} takes one scalar per row: use "
            f"{cure}a per-token estimator such as GAE"
        )
    if options.group_size == 1 and estimator.compares:
        yield (
            f"{chosen} compares the samples of a prompt, so group_size=1 trains nothing: use group_size=2 or "
            "more, or an estimator without a group such as reinforce, ReMax or GAE"
        )
    for callback in corrections.contributors(*ROW_REWARDS) if estimator.needs_greedy else ():
        if callback.reads:
            yield (
                f"{chosen} scores a greedy answer with the reward of {type(callback).__name__}, which reads "
                f"{callback.reads[0]}, and greedy answers have none: use one without the other"
            )
        elif callback.compares_rows:
            yield (
                f"{chosen} subtracts the score of a greedy answer, which {type(callback).__name__} cannot "
                "normalize with the samples: use one without the other"
            )
    for callback in corrections.callbacks if options.group_size == 1 else ():
        if callback.compares_groups:
            yield (
                f"{type(callback).__name__} compares the samples of a prompt, which group_size=1 does not have: use "
                "group_size=2 or more, or remove it"
            )
    if options.critic and "values" not in estimator.reads:
        yield f"critic= has no effect, because {chosen} reads no values: use GAE, or no critic"


def check_turn_rewards(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem if the estimator uses turn rewards that do not sum to the row's reward."""
    if not options.advantages.turn_rewards:
        return
    chosen = f"{options.advantages.name}(turn_rewards=True)"
    weights = [
        weight for function, weight in options.rewards.sources.values() if isinstance(function, EnvironmentReward)
    ]
    if weights != [1.0]:
        yield (
            f"expected one EnvironmentReward() of weight 1 for {chosen}, got "
            f"{f'weights {weights}' if weights else 'none'}: add it to rewards="
        )
    for callback in corrections.contributors(*ROW_REWARDS):
        if callback.scales_rewards or callback.compares_rows:
            yield (
                f"expected unscaled rewards for {chosen}, got {type(callback).__name__}, which scales rewards of rows "
                "but not of turns: use one without the other"
            )


def check_reads(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem for each field that is read but does not exist; warn of corrections without effect."""
    readers: dict[str, list[str]] = {}
    for name, fields in _reading(options, corrections):
        for field in fields:
            readers.setdefault(field, []).append(name)
    names = {field.name for field in dataclasses.fields(LossView)}
    late = names - {field.name for field in dataclasses.fields(Rollout)}
    for field in sorted({field for callback in corrections.callbacks for field in callback.reads} & late):
        yield f"expected {field} in reads_at_loss, got it in reads: it exists only at the loss"
    for field, who in readers.items():
        if field.partition("/")[0] not in names:
            yield f'expected {who[0]} to read a field of Rollout, got "{field}"; known: {sorted(names)}'
    yield from _extras_problems(
        {field: who for field, who in readers.items() if field.partition("/")[0] in names}, options, corrections
    )
    yield from _stage_problems(corrections)
    if "values" in readers and not options.critic:
        yield f'{readers["values"][0]} reads "values", but there is no critic: pass critic= to the module'
    if "segments" in readers and options.environment is None:
        yield (
            f'{readers["segments"][0]} reads "segments", which only conversations have, but there is no environment: '
            "pass environment= to the module, or remove it"
        )
    if "rollout_logprobs" in readers and not options.engine.capabilities.returns_logprobs:
        yield (
            f'{readers["rollout_logprobs"][0]} reads "rollout_logprobs", but {type(options.engine).__name__} gives '
            "none: use an engine that returns log-probabilities"
        )
    if options.steps_per_rollout == 1:
        _warn_of_idle_corrections(corrections)


def check_filters(options: Options) -> Problems:
    """Yield a problem for temperatures and filters that the engine changes, ignores or lacks."""
    yield from temperature_problems(options.sampling, options.engine)
    for evaluation in evaluations_of(options.evaluation):
        if evaluation.sampling is not None:
            yield from filter_problems(evaluation.sampling, options.engine)


def check_reference(options: Options, corrections: Corrections) -> None:
    """Warn of a reference that is never loaded."""
    if options.reference and not any("ref_logprobs" in fields for _, fields in _reading(options, corrections)):
        warnings.warn(
            "reference= is given, but nothing reads ref_logprobs, so it is not loaded: add ReferenceKL() or "
            "AdaptiveKL() to the callbacks, or remove it",
            stacklevel=2,
        )


def check_extras(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem for each extra that training needs and the engine cannot record."""
    for name, who in needed_extras(corrections, options.sampling).items():
        if name not in options.engine.capabilities.extras:
            declared = "filters=True, " if name == SAMPLING_MASK else ""
            yield (
                f'{who} needs "{name}" of every token, which {type(options.engine).__name__} does not record: use '
                "engine=TransformersEngine(), or remove it; an engine of your own that records it declares "
                f'Capabilities({declared}extras=frozenset(["{name}"]))'
            )
    if who := next((one for one in corrections.callbacks if {*one.records} & TOP == {TOP_LOGPROBS}), None):
        yield (
            f'expected records = ("{TOP_IDS}", "{TOP_LOGPROBS}") of {type(who).__name__}, got "{TOP_LOGPROBS}" alone: '
            "name both, and set pl_module.options.engine.top_logprobs = k in setup for the k likeliest tokens; without "
            "it, all of the vocabulary are recorded"
        )


def check_pipelining(options: Options, corrections: Corrections) -> Problems:
    """Yield a problem if the engine cannot generate while the policy trains; warn if nothing corrects for it."""
    if options.max_staleness == 0:
        return
    can, name, staleness = options.engine.capabilities, type(options.engine).__name__, options.max_staleness
    if not can.generates_ahead:
        yield (
            f"expected an engine that generates while the policy trains, because max_staleness={staleness}, got a "
            f"{name} on the trainer's GPU, where the trainer's kernels would delay each token: use VLLMServerEngine on "
            "other GPUs, or max_staleness=0"
        )
        return
    if can.sleeps:
        yield (
            f"expected an engine that stays awake while the policy trains, because max_staleness={staleness}, got "
            f"{name}, which sleeps after each rollout: use {name}(sleeps=False), or max_staleness=0"
        )
    if can.collective:
        yield (
            f"expected one engine per rank, because max_staleness={staleness} generates during the trainer's "
            f"collectives, got a shared {name}: use {name}(tensor_parallel_size=1), or max_staleness=0"
        )
    if staleness > 1 and not can.syncs_while_generating:
        yield (
            f"expected max_staleness=1 with {name}, got {staleness}: it cannot receive weights while it generates, "
            "so each sync would wait for all rollouts in flight; use 1, or an engine on a server"
        )
    loss, correcting = options.loss, corrections.contributors(*POLICY_LOSS_FACTORS)
    reads = {*loss.reads, *(field for callback in correcting for field in (*callback.reads, *callback.reads_at_loss))}
    if "rollout_logprobs" not in reads and not _centering(corrections):
        cure = "OffPolicyIS" if loss.ratio is None else "TruncatedIS"
        warnings.warn(
            f"max_staleness={staleness} trains on samples of earlier weights, and nothing corrects for it: add "
            f"{cure}() to the callbacks",
            stacklevel=2,
        )


def check_sizes(prompts: int, minibatches: int, ranks: int) -> Problems:
    """Yield a problem if the prompts of a rollout do not divide by minibatches x ranks."""
    if prompts % (minibatches * ranks):
        yield (
            f"expected prompts_per_rollout to be a multiple of minibatches_per_rollout x ranks, got {prompts} for "
            f"{minibatches} x {ranks}: {size_cure(prompts, minibatches * ranks)}"
        )


def size_cure(prompts: int, parts: int) -> str:
    """Return the nearest valid settings for a message."""
    below = prompts // parts * parts
    near = " or ".join(str(number) for number in (below, below + parts) if number)
    return f"prompts_per_rollout={near}, or other minibatches_per_rollout="


def _centering(corrections: Corrections) -> list[RLCallback]:
    """Return the corrections that read an output of the forward computed from the engine's likeliest tokens."""
    outputs = outputs_from(TOP_LOGPROBS)
    return [callback for callback in corrections.callbacks if outputs & set(callback.reads_at_loss)]


def _reading(options: Options, corrections: Corrections) -> list[tuple[str, tuple[str, ...]]]:
    """Return the fields that corrections, loss and estimator read, with the reader's name."""
    reading = [(type(c).__name__, (*c.reads, *c.reads_at_loss)) for c in corrections.callbacks]
    reading.append((_script_name("loss", options.loss, LOSSES), options.loss.reads))
    reading.append((_script_name("advantages", options.advantages, ESTIMATORS), options.advantages.reads))
    return reading


def _script_name(option: str, chosen: PolicyLoss | Estimator, known: Mapping[str, PolicyLoss | Estimator]) -> str:
    """Return an option as source code, with its registered name if it has one."""
    names = [name for name, one in known.items() if one is chosen]
    return f'{option}="{names[0]}"' if names else f"{option}={chosen.name}"


def _extras_problems(readers: Mapping[str, Sequence[str]], options: Options, corrections: Corrections) -> Problems:
    """Yield entries of dict fields that nothing provides, or that two callbacks provide."""
    advantages, extras = options.advantages, options.engine.capabilities.extras
    providing = corrections.contributors("provide")
    recorded = needed_extras(corrections, options.sampling).keys() & extras
    known = {f"token_extras/{name}" for name in recorded} | {f"prompt_extras/{name}" for name in recorded & {ROUTES}}
    known |= {f"extras/{GREEDY_SCORE}"} if advantages.needs_greedy else set()
    known |= {f"token_extras/{name}" for name in (ROLES, SUM_PI_SQUARED)} & set(advantages.reads)
    for callback in providing:
        for twice in sorted(known & set(callback.provides)):
            yield (
                f'expected one provider of "{twice}", got {type(callback).__name__} too: rename its tensor, or '
                "remove one of them"
            )
        known |= set(callback.provides)
    if not all(callback.provides for callback in providing):
        return  # a callback without `provides` may provide any entry
    for field, who in readers.items():
        if "/" in field and not field.startswith("rewards_by_function/") and field not in known:
            cure = "add a callback whose `provide` returns it"
            if (name := field.partition("/")[2]) in extras:
                cure = f'add `records = ("{name}",)` to {who[0]}, because the engine records it only for its readers'
            yield (
                f'{who[0]} reads "{field}", but nothing provides it: {cure}, or remove it from `reads`; provided: '
                f"{sorted(known) or 'nothing'}"
            )


def _stage_problems(corrections: Corrections) -> Problems:
    """Yield fields in ``reads`` that are computed after all of the reader's per-rollout methods."""
    for callback in corrections.callbacks:
        rows = [name for name, entry in CONTRIBUTIONS.items() if entry.when != "update"]
        methods = [method for method in rows if method in callback.contributes]
        for field in callback.reads:
            early = MADE_AFTER.get(field, ())
            if methods and all(method in early for method in methods):
                yield (
                    f'{type(callback).__name__} reads "{field}" in {", ".join(methods)}, before {field} '
                    f"exist: read it in {'provide, ' if 'provide' not in early else ''}rollout_metrics or observe, or "
                    "name it in reads_at_loss for a mask, weight or term of the loss"
                )


def _warn_of_idle_corrections(corrections: Corrections) -> None:
    for callback in corrections.callbacks:
        if "loss_term" in callback.contributes:
            continue  # a ratio of 1 in a term still carries its gradient
        if "old_logprobs" in callback.reads_at_loss and "rollout_logprobs" not in callback.reads_at_loss:
            cure = f": use {callback.alternative}" if callback.alternative else ""
            warnings.warn(
                "with one optimizer step per rollout old_logprobs equal logprobs, so "
                f"{type(callback).__name__} has no effect{cure}, or take more steps (minibatches_per_rollout=, "
                "epochs_per_rollout=)",
                stacklevel=2,
            )
