"""Checks that options, callbacks and data are compatible.

They read constructor arguments alone, so every rank raises the same error before weights are loaded.
"""

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.advantages import ESTIMATORS, Estimator
from lightning_rl.algorithm import Algorithm
from lightning_rl.corrections import (
    CONTRIBUTIONS,
    MADE_AFTER,
    POLICY_LOSS_FACTORS,
    TOKEN_REWARDS,
    Corrections,
    LossView,
)
from lightning_rl.distributed import Parallel, parallel_of
from lightning_rl.environments import EnvironmentReward
from lightning_rl.generation import Engine, SamplingParams
from lightning_rl.losses import LOSSES, PolicyLoss, ValueLoss
from lightning_rl.optimizers import OptimizerBuilder
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.attention import ATTENTIONS, AUTO, choose_attention, hardware_of
from lightning_rl.policy.compilation import BACKENDS
from lightning_rl.policy.liger import has_liger
from lightning_rl.rollout import GREEDY_SCORE, SAMPLING_MASK, SUM_PI_SQUARED, Rollout
from lightning_rl.utils.arguments import check_choices
from lightning_rl.utils.trainer import callbacks_of

TIMEOUTS = ("environment_timeout", "conversation_timeout")
CONVERSATION_OPTIONS = (
    "max_turns",
    "max_turn_tokens",
    "tool_parser",
    "environment_workers",
    *TIMEOUTS,
    "max_environment_failure_rate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Optional fields that are read, so the passes that have to run."""

    old_logprobs: bool = False
    ref_logprobs: bool = False
    sum_pi_squared: bool = False


def needs(algorithm: Algorithm, *, steps_per_rollout: int) -> Needs:
    """Return the passes over a rollout that have to run."""
    early = {field for callback in algorithm.corrections.callbacks for field in callback.reads}
    early |= set(algorithm.advantages.reads)
    return Needs(
        old_logprobs=steps_per_rollout > 1 or "old_logprobs" in early,
        ref_logprobs=any("ref_logprobs" in fields for _, fields in _reading(algorithm)),
        sum_pi_squared=f"token_extras/{SUM_PI_SQUARED}" in early,
    )


def check_reference(reference: Any, needed: Needs) -> None:
    """Warn of a reference that is never loaded."""
    if reference is not None and not needed.ref_logprobs:
        warnings.warn(
            "reference= is given, but nothing reads ref_logprobs, so it is not loaded: add ReferenceKL() or "
            "AdaptiveKL() to the callbacks, or remove it",
            stacklevel=2,
        )


def check_reads(algorithm: Algorithm, *, engine: Engine, critic: bool, steps_per_rollout: int) -> None:
    """Warn of corrections without effect.

    Raises:
        ValueError: If a field is read that does not exist or that nothing provides.
    """
    readers: dict[str, list[str]] = {}
    early = {field for callback in algorithm.corrections.callbacks for field in callback.reads}
    for name, fields in _reading(algorithm):
        for field in fields:
            readers.setdefault(field, []).append(name)
    names = {spec.name for spec in dataclasses.fields(LossView)}
    late = names - {spec.name for spec in dataclasses.fields(Rollout)}
    if early & late:
        raise ValueError(
            f"expected {sorted(early & late)[0]} in reads_at_loss, got it in reads: it exists only at the loss"
        )
    for field, who in readers.items():
        if field.partition("/")[0] not in names:
            raise ValueError(f'expected {who[0]} to read a field of Rollout, got "{field}"; known: {sorted(names)}')
    _check_extras(readers, algorithm, engine)
    _check_stages(algorithm.corrections)
    if "values" in readers and not critic:
        raise ValueError(f'{readers["values"][0]} reads "values", but there is no critic: pass critic= to the module')
    if "rollout_logprobs" in readers and not engine.capabilities.returns_logprobs:
        raise ValueError(
            f'{readers["rollout_logprobs"][0]} reads "rollout_logprobs", but {type(engine).__name__} gives none: use '
            "an engine that returns log-probabilities"
        )
    if steps_per_rollout == 1:
        _warn_of_dead_knobs(algorithm.corrections)


def needed_extras(corrections: Corrections, sampling: SamplingParams) -> dict[str, str]:
    """Return the extras that a run needs of each token, with the name of the user of each."""
    needed = {name: type(callback).__name__ for callback in corrections.callbacks for name in callback.records}
    if sampling.filters:
        needed[SAMPLING_MASK] = f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}"
    return needed


def check_extras(corrections: Corrections, engine: Engine, sampling: SamplingParams) -> None:
    """Raise ValueError if the engine cannot record an extra that training needs."""
    for name, who in needed_extras(corrections, sampling).items():
        if name not in engine.capabilities.extras:
            raise ValueError(
                f'{who} needs "{name}" of every token, which {type(engine).__name__} does not record: use '
                f"engine=TransformersEngine(), or remove it"
            )


def check_ratios(corrections: Corrections, loss: PolicyLoss) -> None:
    """Raise ValueError if the importance ratios of loss and weights count one policy twice."""
    weights = corrections.contributors("token_weight")
    factors = [(_script_name("loss", loss, LOSSES), loss.ratio, None)]
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
                    raise ValueError(
                        f"{name} carries the ratio {ratio[0]}/{ratio[1]} and {other} "
                        f"{other_ratio[0]}/{other_ratio[1]}, so the {ratio[place]} policy would count twice as "
                        f"{side}{cure}"
                    )


def check_pairs(corrections: Corrections) -> None:
    """Raise ValueError if a correction replaces another one, or has no effect beside it."""
    present = {type(callback).name: type(callback).__name__ for callback in corrections.callbacks}
    for callback in corrections.callbacks:
        name = type(callback).__name__
        for other in set(callback.idle_beside) & present.keys():
            raise ValueError(
                f"expected {name} or {present[other]}, got both: {name} has no effect beside {present[other]}; remove "
                "one of them"
            )
        for replaced in set(callback.replaces) & present.keys():
            raise ValueError(
                f"expected {name} instead of {present[replaced]}, got both, which would count twice: remove "
                f"{present[replaced]}"
            )


def check_estimator(corrections: Corrections, estimator: Estimator, *, critic: bool, group_size: int = 2) -> None:
    """Raise ValueError if the estimator cannot use token rewards, critic or groups."""
    chosen = _script_name("advantages", estimator, ESTIMATORS)
    for callback in () if estimator.per_token else corrections.contributors(*TOKEN_REWARDS):
        cure = f"{callback.alternative}, or " if callback.alternative else ""
        raise ValueError(
            f"{type(callback).__name__} returns a reward per token, but {chosen} takes one scalar per row: use "
            f"{cure}a per-token estimator such as GAE"
        )
    if group_size == 1 and estimator.compares:
        raise ValueError(
            f"{chosen} compares the samples of a prompt, so group_size=1 trains nothing: use group_size=2 or "
            "more, or an estimator without a group such as reinforce, ReMax or GAE"
        )
    for callback in corrections.contributors("reward_bonus") if estimator.needs_greedy else ():
        if callback.reads:
            raise ValueError(
                f"{chosen} scores a greedy answer with the bonus of {type(callback).__name__}, which reads "
                f"{callback.reads[0]}, and greedy answers have none: use one without the other"
            )
        if callback.compares_rows:
            raise ValueError(
                f"{chosen} subtracts the score of a greedy answer, which {type(callback).__name__} cannot "
                "normalize with the samples: use one without the other"
            )
    for callback in corrections.callbacks if group_size == 1 else ():
        if callback.compares_groups:
            raise ValueError(
                f"{type(callback).__name__} compares the samples of a prompt, which group_size=1 does not have: use "
                "group_size=2 or more, or remove it"
            )
    if critic and "values" not in estimator.reads:
        raise ValueError(f"critic= has no effect, because {chosen} reads no values: use GAE, or no critic")


def check_kernel_options(*, attention: str, backend: bool | str, liger: bool, packing: bool) -> None:
    """Raise ValueError for unknown kernels and for options that exclude each other."""
    check_choices(ATTENTIONS, attention=attention)
    if not isinstance(backend, bool) and backend not in BACKENDS:
        raise ValueError(f"expected compile to be True, False or one of {', '.join(BACKENDS)}, got {backend!r}")
    if attention != AUTO and not packing:
        raise ValueError(
            f'expected attention="auto" with packing=False, got "{attention}", a kernel for packed sequences: remove '
            "one of them"
        )
    if backend and liger:
        raise ValueError("expected compile= or liger=, got both, which replace the same operations: remove one of them")


def check_kernels(parallel: Parallel, *, attention: str, compiled: bool, liger: bool) -> None:
    """Raise ValueError if device, packages or strategy do not support the kernels, before a model is loaded."""
    device = parallel.strategy.root_device
    choose_attention(attention, hardware_of(device), None)
    if liger and device.type != "cuda":
        raise ValueError(f"expected a GPU for liger=True, got {device.type}: remove it")
    if liger and not has_liger():
        raise ValueError(
            "expected liger-kernel to be installed for liger=True, got an environment without it: "
            'pip install "lightning-rl[liger]", or remove it'
        )
    if compiled and not parallel.compiles:
        name = type(parallel.strategy).__name__
        raise ValueError(
            f"expected a strategy that supports compile=, got {name}, which splits the parts of a layer: use one "
            'device, "ddp", or "fsdp2" without tensor parallelism, or remove it'
        )


def check_attention(attention: str, policy: PolicyModel, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if the attention kernel does not support the model's dtype or head sizes."""
    for size in policy.head_sizes():
        choose_attention(attention, hardware_of(device), dtype, frozenset((size,)))


def check_pipelining(corrections: Corrections, loss: PolicyLoss, *, engine: Engine, max_staleness: int) -> None:
    """Warn if nothing corrects for stale samples.

    Raises:
        ValueError: If the engine cannot generate while the policy trains.
    """
    name = type(engine).__name__
    if max_staleness == 0:
        return
    if not engine.capabilities.generates_ahead:
        raise ValueError(
            f"expected an engine that generates while the policy trains, because max_staleness={max_staleness}, got a "
            f"{name} on the trainer's GPU, where the trainer's kernels would delay each token: use VLLMServerEngine on "
            "other GPUs, or max_staleness=0"
        )
    if engine.capabilities.sleeps:
        raise ValueError(
            f"expected an engine that stays awake while the policy trains, because max_staleness={max_staleness}, got "
            f"{name}, which sleeps after each rollout: use {name}(sleeps=False), or max_staleness=0"
        )
    if engine.capabilities.collective:
        raise ValueError(
            f"expected one engine per rank, because max_staleness={max_staleness} generates during the trainer's "
            f"collectives, got a shared {name}: use {name}(tensor_parallel_size=1), or max_staleness=0"
        )
    if max_staleness > 1 and not engine.capabilities.syncs_while_generating:
        raise ValueError(
            f"expected max_staleness=1 with {name}, got {max_staleness}: it cannot receive weights while it generates, "
            "so each sync would wait for all rollouts in flight; use 1, or an engine on a server"
        )
    correcting = corrections.contributors(*POLICY_LOSS_FACTORS)
    reads = [*loss.reads, *(field for callback in correcting for field in (*callback.reads, *callback.reads_at_loss))]
    if "rollout_logprobs" not in reads:
        cure = "OffPolicyIS" if loss.ratio is None else "TruncatedIS"
        warnings.warn(
            f"max_staleness={max_staleness} trains on samples of earlier weights, and nothing corrects for it: add "
            f"{cure}() to the callbacks",
            stacklevel=2,
        )


def check_flags(trainer: Trainer) -> None:
    """Raise ValueError for Trainer flags and callbacks that manual optimization does not support."""
    if trainer.gradient_clip_val:
        raise ValueError(
            f"expected Trainer without gradient_clip_val, got {trainer.gradient_clip_val}: pass max_grad_norm= to "
            "RLLightningModule"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"expected Trainer without accumulate_grad_batches, got {trainer.accumulate_grad_batches}: "
            "max_tokens_per_microbatch= of RLLightningModule splits a step into microbatches"
        )
    if trainer.precision == "16-true":
        raise ValueError(
            'expected a precision for training, got Trainer(precision="16-true"), which loses small weight updates and '
            'overflows gradients: use "bf16-mixed", "16-mixed" or "32-true"'
        )
    for callback in callbacks_of(trainer):
        if isinstance(callback, type):
            callbacks_of(trainer).remove(callback)  # Lightning would call it while handling the error
            raise ValueError(f"expected callbacks to be objects, got the class {callback.__name__}: call it")
        _check_averaging(callback, trainer)
        _check_tuner(callback)


def _check_averaging(callback: Callback, trainer: Trainer) -> None:
    if isinstance(callback, StochasticWeightAveraging):
        raise ValueError(
            "expected Trainer without StochasticWeightAveraging, which copies the module before the policy is built: "
            "use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging"
        )
    if isinstance(callback, WeightAveraging) and parallel_of(trainer.strategy).sharded:
        name = type(callback).__name__
        raise ValueError(
            f"expected Trainer without {name} under a strategy that shards the policy, got "
            f"{type(trainer.strategy).__name__}: it averages whole weights, so use DDP, or remove it"
        )


def _check_tuner(callback: Callback) -> None:
    if isinstance(callback, LearningRateFinder):
        raise ValueError(
            "expected a fit, got lr_find (LearningRateFinder), which needs a decreasing loss, but a policy gradient "
            "loss does not decrease: choose lr= of the optimizer, 1e-6 to 1e-5 for full fine-tuning, and watch "
            "reward/task and optim/grad_norm"
        )
    if isinstance(callback, BatchSizeFinder):
        raise ValueError(
            "expected a fit, got scale_batch_size (BatchSizeFinder), which needs a batch size: bound memory with "
            "max_tokens_per_microbatch= of RLLightningModule for updates, and max_rows= of the engine for generation"
        )


def check_conversations(options: Mapping[str, Any], defaults: Mapping[str, Any], *, environments: bool) -> None:
    """Check the options of conversations; warn of timeouts without effect.

    Args:
        options: Options of the run by name.
        defaults: Defaults of the same options.
        environments: True if there is an environment.

    Raises:
        ValueError: If an option has no effect, or max_turn_tokens exceeds max_new_tokens.
    """
    given = [name for name in CONVERSATION_OPTIONS if options[name] != defaults[name]]
    if given and not environments:
        raise ValueError(
            f"expected environment= or tools= for {given[0]}={options[given[0]]!r}, got neither: pass one of them, or "
            f"remove {given[0]}"
        )
    for name in given if not options["environment_workers"] else ():
        if name in TIMEOUTS:
            warnings.warn(
                f"{name}={options[name]:g} has no effect, because environments run in this process: pass "
                f"environment_workers=, or remove {name}",
                stacklevel=2,
            )
    max_turn_tokens, max_new_tokens = options["max_turn_tokens"], options["sampling"].max_new_tokens
    if max_turn_tokens is not None and max_turn_tokens > max_new_tokens:
        raise ValueError(
            f"expected max_turn_tokens of at most {max_new_tokens}, the max_new_tokens of sampling for a whole "
            f"conversation, got {max_turn_tokens}: raise max_new_tokens, or lower max_turn_tokens"
        )


def check_rewards(functions: Iterable[Any], *, environments: bool) -> None:
    """Raise ValueError for an EnvironmentReward without environments."""
    if not environments and any(isinstance(function, EnvironmentReward) for function in functions):
        raise ValueError(
            "expected environment= or tools= for EnvironmentReward, got neither: pass one of them, or another reward"
        )


def check_turn_rewards(
    rewards: Mapping[str, tuple[Any, float]], corrections: Corrections, estimator: Estimator
) -> None:
    """Check that the rewards of turns sum to the row's reward if the estimator uses turn rewards.

    Args:
        rewards: Functions and weights by name.
        corrections: Corrections of the run.
        estimator: Advantage estimator.

    Raises:
        ValueError: If the rewards are not one EnvironmentReward of weight 1, or a correction changes row rewards.
    """
    if not estimator.turn_rewards:
        return
    chosen = f"{estimator.name}(turn_rewards=True)"
    weights = [weight for function, weight in rewards.values() if isinstance(function, EnvironmentReward)]
    if weights != [1.0]:
        raise ValueError(
            f"expected one EnvironmentReward() of weight 1 for {chosen}, got "
            f"{f'weights {weights}' if weights else 'none'}: add it to rewards="
        )
    for callback in corrections.contributors("reward_bonus"):
        if callback.scales_rewards or callback.compares_rows:
            raise ValueError(
                f"expected unscaled rewards for {chosen}, got {type(callback).__name__}, which scales rewards of rows "
                "but not of turns: use one without the other"
            )


def check_filters(samplings: Iterable[SamplingParams | None], engine: Engine) -> None:
    """Check the sampling filters of evaluations.

    Raises:
        ValueError: If the engine would ignore a filter, or needs one because it records sampling masks as lists.
    """
    lists_masks = SAMPLING_MASK in engine.extras and engine.capabilities.lists_masks
    for sampling in samplings:
        if sampling is not None and sampling.temperature > 0 and not sampling.filters and lists_masks:
            raise ValueError(
                f"expected a greedy or filtered evaluation, because training filters, got temperature="
                f"{sampling.temperature} alone: {type(engine).__name__} would list the whole vocabulary per token; "
                "pass top_k=, top_p= or min_p=, or engine=TransformersEngine()"
            )
        if sampling is not None and sampling.filters and not engine.capabilities.filters:
            raise ValueError(
                f"expected an engine that supports top_k={sampling.top_k}, top_p={sampling.top_p}, "
                f"min_p={sampling.min_p} of an evaluation, got {type(engine).__name__}, which ignores them: use "
                "engine=TransformersEngine(), or remove them"
            )


def check_sources(**sources: Any) -> None:
    """Raise ValueError unless each source is a name, path or function; only the policy is required."""
    for name, source in sources.items():
        if (source is None and name != "policy") or (isinstance(source, str | Path) and str(source)):
            continue
        if callable(source) and not isinstance(source, type | nn.Module):
            continue
        got = f"the class {source.__name__}" if isinstance(source, type) else repr(source)
        got = f"a {type(source).__name__} instance" if isinstance(source, nn.Module) else got
        raise ValueError(
            f"expected {name} to be the name or path of a causal language model, or a function that builds one, got "
            f"{got}: pass a name, or a function such as lambda: AutoModelForCausalLM.from_config(config)"
        )


def check_parts(*, engine: Any, sampling: Any, value_loss: Any) -> None:
    """Raise ValueError unless each part is an instance of its class."""
    examples = {
        "engine": (engine, Engine, "VLLMEngine(), or None for the embedded engine"),
        "sampling": (sampling, SamplingParams, "SamplingParams(temperature=1.0, max_new_tokens=256)"),
        "value_loss": (value_loss, ValueLoss, "ValueLoss(coef=0.5)"),
    }
    for name, (part, kind, example) in examples.items():
        if not isinstance(part, kind) and not (name == "engine" and part is None):
            got = f"the class {part.__name__}" if isinstance(part, type) else repr(part)
            raise ValueError(f"expected {name} to be an object such as {example}, got {got}")
    if isinstance(engine, Engine) and not hasattr(engine, "pushed"):
        name = type(engine).__name__
        raise ValueError(
            f"expected an engine with state and version, got an uninitialized {name}: call super().__init__() in "
            f"{name}.__init__"
        )
    if not sampling.temperature > 0:
        raise ValueError(
            "expected a temperature > 0 for training, got 0: greedy answers to a prompt are identical; only an "
            "evaluation may be greedy"
        )


def check_builders(*, optimizer: Any, lr_scheduler: Any) -> None:
    """Raise ValueError unless optimizer and scheduler are given as functions."""
    if not callable(optimizer):
        raise ValueError(
            "expected optimizer to be a function from parameter groups to an optimizer, such as partial(AdamW, "
            f"lr=1e-6), got {optimizer!r}"
        )
    if not (lr_scheduler is None or callable(lr_scheduler)):
        raise ValueError(
            "expected lr_scheduler to be a function from the optimizer to a scheduler, such as warmup_then_linear(5, "
            f"100), or None, got {lr_scheduler!r}"
        )


def check_trainable(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the policy has no trainable parameters."""
    if not groups[0]["params"]:
        raise ValueError(
            "expected a policy with trainable parameters, got requires_grad=False for all of them: enable some in the "
            "function that is passed as policy=, or add adapters to the model"
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError if the scheduler does not count optimizer steps."""
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        reads = ", which waits for a metric" if isinstance(scheduler, ReduceLROnPlateau) else ""
        raise ValueError(
            "expected lr_scheduler to build a scheduler of torch.optim.lr_scheduler that counts optimizer steps, such "
            f"as warmup_then_linear(5, 100), got {type(scheduler).__name__}{reads}"
        )


def build_optimizer(builder: OptimizerBuilder, groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that ``builder`` builds.

    Raises:
        ValueError: If it raises TypeError or returns no optimizer.
    """
    try:
        optimizer: Any = builder(groups)
    except TypeError as error:  # torch compares options with numbers
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, but it raised "
            f"TypeError: {error}; options must be numbers, but YAML reads 1e-6 as a string: write 1.0e-6"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, got {optimizer!r}"
        )
    return optimizer


def check_eos(eos_token_ids: Iterable[int], vocabulary: int) -> None:
    """Raise ValueError for EOS ids outside the policy's vocabulary."""
    outside = sorted(i for i in eos_token_ids if not 0 <= i < vocabulary)
    if outside:
        raise ValueError(
            f"expected eos_token_ids in [0, {vocabulary}), the policy's vocabulary, got {outside}: pass "
            "eos_token_ids= of this policy, or its tokenizer"
        )


def check_names(known: Iterable[str], **given: Any) -> tuple[str, ...]:
    """Return an argument, given by name, as a tuple of names; raise ValueError unless all are known names."""
    ((name, names),) = given.items()
    if isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise ValueError(f'expected {name} to be a list of names, such as ["optimizer"], got {names!r}')
    known = list(known)
    for one in names:
        if one not in known:
            raise ValueError(f"expected {name} to contain only {', '.join(known)}, got {one!r}")
    return tuple(names)


def check_rollouts(**given: Any) -> frozenset[int]:
    """Return an argument, given by name, as a set of rollout numbers; raise ValueError if it is something else."""
    ((name, numbers),) = given.items()
    listed: list[Any] = list(numbers) if isinstance(numbers, Collection) and not isinstance(numbers, str) else [None]
    if not all(type(one) is int and one >= 0 for one in listed):
        raise ValueError(f"expected {name} to be a list of numbers of rollouts, such as [7], got {numbers!r}")
    return frozenset(listed)


def check_whole_checkpoint(checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint holds weights alone, from which a run cannot resume."""
    if "lr_schedulers" not in checkpoint:  # sharded strategies keep optimizers elsewhere
        raise ValueError(
            "expected a checkpoint to resume from, got weights alone (save_weights_only=True): pass one of "
            "ModelCheckpoint(save_weights_only=False), or start a new run with "
            "RLLightningModule.load_from_checkpoint(...)"
        )


def check_checkpoint(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of an RLLightningModule in a checkpoint; raise ValueError if there is none."""
    if "lightning_rl" not in checkpoint:
        raise ValueError(
            "expected a checkpoint of an RLLightningModule to resume from or to evaluate, got one of another module: "
            "to start from the weights of a model, pass its folder as policy="
        )
    return checkpoint["lightning_rl"]


def check_whole_rollouts(step_indices: int, steps_per_rollout: int) -> None:
    """Raise ValueError if the loader's epochs end within a rollout; limits of the Trainer may."""
    if step_indices % steps_per_rollout:
        raise ValueError(
            f"expected a loader with a multiple of {steps_per_rollout} steps (minibatches_per_rollout x "
            f"epochs_per_rollout), got {step_indices}"
        )


def check_sizes(*, prompts_per_rollout: int, minibatches: int, world_size: int) -> None:
    """Raise ValueError if the prompts of a rollout do not divide by minibatches x ranks."""
    if prompts_per_rollout % (minibatches * world_size):
        raise ValueError(
            f"expected prompts_per_rollout to be a multiple of minibatches_per_rollout x ranks, got "
            f"{prompts_per_rollout} for {minibatches} x {world_size}: "
            f"{size_cure(prompts_per_rollout, minibatches * world_size)}"
        )


def size_cure(prompts: int, parts: int) -> str:
    """Return the nearest valid settings for a message."""
    below = prompts // parts * parts
    near = " or ".join(str(number) for number in (below, below + parts) if number)
    return f"prompts_per_rollout={near}, or other minibatches="


def _reading(algorithm: Algorithm) -> list[tuple[str, tuple[str, ...]]]:
    """Return the fields that corrections, loss and estimator read, with the reader's name."""
    reading = [(type(c).__name__, (*c.reads, *c.reads_at_loss)) for c in algorithm.corrections.callbacks]
    reading.append((_script_name("loss", algorithm.loss, LOSSES), algorithm.loss.reads))
    reading.append((_script_name("advantages", algorithm.advantages, ESTIMATORS), algorithm.advantages.reads))
    return reading


def _script_name(option: str, chosen: PolicyLoss | Estimator, known: Mapping[str, PolicyLoss | Estimator]) -> str:
    """Return an option as source code, with its registered name if it has one."""
    names = [name for name, one in known.items() if one is chosen]
    return f'{option}="{names[0]}"' if names else f"{option}={chosen.name}"


def _check_extras(readers: Mapping[str, Sequence[str]], algorithm: Algorithm, engine: Engine) -> None:
    """Raise ValueError for entries of dict fields that nothing provides, or that two callbacks provide."""
    providing = algorithm.corrections.contributors("provide")
    known = {f"{field}/{name}" for field in ("token_extras", "prompt_extras") for name in engine.capabilities.extras}
    known |= {f"extras/{GREEDY_SCORE}"} if algorithm.advantages.needs_greedy else set()
    known |= {f"token_extras/{SUM_PI_SQUARED}"} & set(algorithm.advantages.reads)
    for callback in providing:
        if twice := sorted(known & set(callback.provides)):
            raise ValueError(
                f'expected one provider of "{twice[0]}", got {type(callback).__name__} too: rename its tensor, or '
                "remove one of them"
            )
        known |= set(callback.provides)
    if not all(callback.provides for callback in providing):
        return  # a callback without `provides` may provide any entry
    for field, who in readers.items():
        if "/" in field and not field.startswith("task_rewards/") and field not in known:
            raise ValueError(
                f'{who[0]} reads "{field}", but nothing provides it: add a callback whose `provide` returns it, or '
                f"remove it from `reads`; provided: {sorted(known) or 'nothing'}"
            )


def _check_stages(corrections: Corrections) -> None:
    """Raise ValueError for fields in ``reads`` that are computed after all of the reader's per-rollout methods."""
    for callback in corrections.callbacks:
        rows = [name for name, entry in CONTRIBUTIONS.items() if entry.when != "update"]
        methods = [method for method in rows if method in callback.contributes]
        for field in callback.reads:
            early = MADE_AFTER.get(field, ())
            if methods and all(method in early for method in methods):
                raise ValueError(
                    f'{type(callback).__name__} reads "{field}" in {", ".join(methods)}, before {field} '
                    f"exist: read it in {'provide, ' if 'provide' not in early else ''}rollout_metrics or observe, or "
                    "name it in reads_at_loss for a mask, weight or term of the loss"
                )


def _warn_of_dead_knobs(corrections: Corrections) -> None:
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
