"""Checks at setup: every field that is read exists, no importance ratio counts a policy twice, sizes divide.

They use constructor arguments alone, so every rank raises alike, before the first weight is loaded.
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
from lightning_rl.arguments import check_choices
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
from lightning_rl.generation import Engine, Sampling
from lightning_rl.losses import LOSSES, PolicyLoss, ValueLoss
from lightning_rl.metrics import callbacks_of
from lightning_rl.optimizers import OptimizerBuilder
from lightning_rl.policy import PolicyModel
from lightning_rl.policy.attention import ATTENTIONS, AUTO, choose_attention, hardware_of
from lightning_rl.policy.compilation import BACKENDS
from lightning_rl.policy.liger import has_liger
from lightning_rl.rollout import GREEDY_SCORE, SAMPLING_MASK, SUM_PI_SQUARED, Rollout

TIMEOUTS = ("environment_timeout", "conversation_timeout")
CONVERSATION_OPTIONS = (
    "max_turns",
    "max_turn_tokens",
    "tool_parser",
    "environment_workers",
    *TIMEOUTS,
    "max_failed_environments",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Which optional fields somebody reads, so which passes have to run."""

    old_logprobs: bool = False
    ref_logprobs: bool = False
    sum_pi_squared: bool = False


def needs(algorithm: Algorithm, *, steps_per_rollout: int) -> Needs:
    """Which passes over a rollout have to run."""
    early = {field for callback in algorithm.corrections.callbacks for field in callback.reads}
    early |= set(algorithm.advantages.reads)
    return Needs(
        old_logprobs=steps_per_rollout > 1 or "old_logprobs" in early,
        ref_logprobs=any("ref_logprobs" in fields for _, fields in _reading(algorithm)),
        sum_pi_squared=f"token_extras/{SUM_PI_SQUARED}" in early,
    )


def check_reference(reference: Any, needed: Needs) -> None:
    """Warns of a reference that is never loaded."""
    if reference is not None and not needed.ref_logprobs:
        warnings.warn(
            "reference= is given, but nothing reads ref_logprobs, so it is not loaded: add ReferenceKL() or "
            "AdaptiveKL() to the callbacks, or leave it out",
            stacklevel=2,
        )


def check_reads(algorithm: Algorithm, *, engine: Engine, critic: bool, steps_per_rollout: int) -> None:
    """Refuses fields that nobody provides, and warns of corrections that can never act.

    Raises:
        ValueError: naming who reads a field that does not exist or that nothing provides, and the setting that would.
    """
    readers: dict[str, list[str]] = {}
    early = {field for callback in algorithm.corrections.callbacks for field in callback.reads}
    for name, fields in _reading(algorithm):
        for field in fields:
            readers.setdefault(field, []).append(name)
    names = {spec.name for spec in dataclasses.fields(LossView)}
    late = names - {spec.name for spec in dataclasses.fields(Rollout)}
    if early & late:
        raise ValueError(f"expected {sorted(early & late)[0]} in reads_at_loss, not in reads: no rollout has it")
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


def extras_to_select(corrections: Corrections, engine: Engine, sampling: Sampling) -> frozenset[str]:
    """What the engine has to record about tokens that train.

    Raises:
        ValueError: naming who needs what the engine cannot record.
    """
    needed = {name: type(callback).__name__ for callback in corrections.callbacks for name in callback.records}
    if sampling.filters:
        needed[SAMPLING_MASK] = f"top_k={sampling.top_k}, top_p={sampling.top_p}, min_p={sampling.min_p}"
    for name, who in needed.items():
        if name not in engine.capabilities.extras:
            raise ValueError(
                f'{who} needs "{name}" of every token, which {type(engine).__name__} does not record: use '
                f"engine=TransformersEngine(), or train without"
            )
    return frozenset(needed)


def check_ratios(corrections: Corrections, loss: PolicyLoss) -> None:
    """Refuses a loss and weights that count one policy twice.

    Raises:
        ValueError: naming both, the policy, and what to use instead.
    """
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
                    if alternative and other_ratio[1] == "rollout":  # any weight that begins there would count it twice
                        cure = f": leave {name} out; a mask such as SequenceRatioMask carries no ratio"
                    raise ValueError(
                        f"{name} carries the ratio {ratio[0]}/{ratio[1]} and {other} "
                        f"{other_ratio[0]}/{other_ratio[1]}, so the {ratio[place]} policy would count twice as "
                        f"{side}{cure}"
                    )


def check_pairs(corrections: Corrections) -> None:
    """Refuses a correction beside the one that it replaces, or beside one that leaves it nothing to change.

    Raises:
        ValueError: naming both.
    """
    present = {type(callback).name: type(callback).__name__ for callback in corrections.callbacks}
    for callback in corrections.callbacks:
        name = type(callback).__name__
        for other in set(callback.idle_beside) & present.keys():
            raise ValueError(
                f"expected {name} or {present[other]}, got both: {present[other]} leaves nothing that {name} could "
                "change; leave one of them out"
            )
        for replaced in set(callback.replaces) & present.keys():
            raise ValueError(
                f"expected {name} instead of {present[replaced]}, got both, so the same would count twice: leave "
                f"{present[replaced]} out"
            )


def check_estimator(corrections: Corrections, estimator: Estimator, *, critic: bool, group_size: int = 2) -> None:
    """Refuses token rewards, a critic or groups that the estimator could make nothing of.

    Raises:
        ValueError: naming both sides and the fix.
    """
    chosen = _script_name("advantages", estimator, ESTIMATORS)
    for callback in () if estimator.per_token else corrections.contributors(*TOKEN_REWARDS):
        cure = f"{callback.alternative}, or " if callback.alternative else ""
        raise ValueError(
            f"{type(callback).__name__} gives a reward to each token, but {chosen} takes one scalar for each "
            f"row: use {cure}an estimator that works per token such as GAE"
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
                "normalise with the samples: use one without the other"
            )
    for callback in corrections.callbacks if group_size == 1 else ():
        if callback.compares_groups:
            raise ValueError(
                f"{type(callback).__name__} compares the samples of a prompt, which group_size=1 does not have: use "
                "group_size=2 or more, or leave it out"
            )
    if critic and "values" not in estimator.reads:
        raise ValueError(f"critic= trains for nothing, because {chosen} reads no values: use GAE, or no critic")


def check_kernel_options(*, attention: str, backend: bool | str, liger: bool, packing: bool) -> None:
    """Refuses kernels that there are not, and those that would have nothing to do.

    Raises:
        ValueError: naming the options and what to do.
    """
    check_choices(ATTENTIONS, attention=attention)
    if not isinstance(backend, bool) and backend not in BACKENDS:
        raise ValueError(f"expected compile to be True, False or one of {', '.join(BACKENDS)}, got {backend!r}")
    if attention != AUTO and not packing:
        raise ValueError(
            f'expected attention="auto" with packing=False, got "{attention}": it is how packed sequences attend; '
            "leave one of them out"
        )
    if backend and liger:
        raise ValueError(
            "expected compile= or liger=, got both, which make kernels of the same operations: leave one of them out"
        )


def check_kernels(parallel: Parallel, *, attention: str, compiled: bool, liger: bool) -> None:
    """Refuses kernels that device, packages or strategy do not allow, before a model is loaded.

    Raises:
        ValueError: naming what is missing and what to do.
    """
    device = parallel.strategy.root_device
    choose_attention(attention, hardware_of(device), None)
    if liger and device.type != "cuda":
        raise ValueError(f"expected a GPU, which the kernels of liger=True are for, got {device.type}: leave it out")
    if liger and not has_liger():
        raise ValueError(
            "expected liger-kernel to be installed, because liger=True, got an environment without it: "
            'pip install "lightning-rl[liger]", or leave it out'
        )
    if compiled and not parallel.compiles:
        name = type(parallel.strategy).__name__
        raise ValueError(
            f"expected a strategy under which layers can be compiled, because compile= is given, got {name} that "
            'splits the parts of a layer: use one device, "ddp", or "fsdp2" without tensor parallelism, or leave it out'
        )


def check_attention(attention: str, policy: PolicyModel, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses a kernel for packed attention that does not take what a model computes with.

    Raises:
        ValueError: naming what it needs.
    """
    for size in policy.head_sizes():
        choose_attention(attention, hardware_of(device), dtype, frozenset((size,)))


def check_pipelining(corrections: Corrections, loss: PolicyLoss, *, engine: Engine, max_staleness: int) -> None:
    """Refuses an engine that cannot generate while the policy trains, and warns if nothing corrects for old samples.

    Raises:
        ValueError: naming the engine and the fix.
    """
    name = type(engine).__name__
    if max_staleness == 0:
        return
    if not engine.capabilities.generates_ahead:
        raise ValueError(
            f"expected an engine that generates while the policy trains, because max_staleness={max_staleness}, got a "
            f"{name} on the GPU of the trainer, where each token would wait for the trainer's kernels: use "
            "VLLMServerEngine on other GPUs, or max_staleness=0"
        )
    if engine.capabilities.sleeps:
        raise ValueError(
            f"expected an engine that stays awake while the policy trains, because max_staleness={max_staleness}, got "
            f"{name} that gives its memory back after each rollout: use {name}(sleeps=False), or max_staleness=0"
        )
    if engine.capabilities.collective:
        raise ValueError(
            f"expected an engine for each rank, because max_staleness={max_staleness} generates while the ranks talk "
            f"to each other, got a {name} that they share: use {name}(tensor_parallel_size=1), or max_staleness=0"
        )
    if max_staleness > 1 and not engine.capabilities.syncs_while_generating:
        raise ValueError(
            f"expected max_staleness=1 with {name}, got {max_staleness}: it cannot take weights while it generates, so "
            "every rollout in flight would be waited for before each sync: use 1, or an engine on a server"
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
    """Refuses flags of the Trainer that manual optimization does not know, by the name of the option that does it.

    Raises:
        ValueError: naming the flag and the option.
    """
    if trainer.gradient_clip_val:
        raise ValueError(
            f"expected Trainer without gradient_clip_val, got {trainer.gradient_clip_val}: pass max_grad_norm= to "
            "RLLightningModule"
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"expected Trainer without accumulate_grad_batches, got {trainer.accumulate_grad_batches}: token_budget= "
            "of RLLightningModule cuts a step into as many microbatches as it takes"
        )
    if trainer.precision == "16-true":
        raise ValueError(
            'expected a precision that can train, got Trainer(precision="16-true"), in which small updates of the '
            'weights are lost and gradients overflow: use "bf16-mixed", "16-mixed" or "32-true"'
        )
    for callback in callbacks_of(trainer):
        if isinstance(callback, type):
            callbacks_of(trainer).remove(callback)  # or Lightning would call it in its own handling of the error
            raise ValueError(f"expected callbacks to be objects, got the class {callback.__name__}: call it")
        _check_averaging(callback, trainer)
        _check_tuner(callback)


def _check_averaging(callback: Callback, trainer: Trainer) -> None:
    if isinstance(callback, StochasticWeightAveraging):
        raise ValueError(
            "expected Trainer without StochasticWeightAveraging, which copies the module before it has a policy and "
            "would average nothing: use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging"
        )
    if isinstance(callback, WeightAveraging) and parallel_of(trainer.strategy).sharded:
        name = type(callback).__name__
        raise ValueError(
            f"expected Trainer without {name} under a strategy that shards the policy, got "
            f"{type(trainer.strategy).__name__}: it averages whole weights, so use DDP, or leave it out"
        )


def _check_tuner(callback: Callback) -> None:
    if isinstance(callback, LearningRateFinder):
        raise ValueError(
            "expected a fit, got lr_find (LearningRateFinder), which reads a loss that falls step by step, and the "
            "loss of a policy gradient does not: choose lr= of the optimizer, 1e-6 to 1e-5 for a whole model, and "
            "watch reward/task and optim/grad_norm"
        )
    if isinstance(callback, BatchSizeFinder):
        raise ValueError(
            "expected a fit, got scale_batch_size (BatchSizeFinder), which needs a batch size, and there is none: "
            "token_budget= of RLLightningModule bounds the memory of the update without changing a result, "
            "max_rows= of the engine that of generation"
        )


def check_conversations(options: Mapping[str, Any], defaults: Mapping[str, Any], *, environments: bool) -> None:
    """Refuses options of conversations that would do nothing, and warns of limits of time that bound nothing.

    Args:
        options: of the run, by name.
        defaults: of the same options.
        environments: whether there is any to talk to.

    Raises:
        ValueError: naming the option and what to do.
    """
    given = [name for name in CONVERSATION_OPTIONS if options[name] != defaults[name]]
    if given and not environments:
        raise ValueError(
            f"expected environment= or tools= for {given[0]}={options[given[0]]!r}, got neither: pass what the "
            f"policy talks to, or leave {given[0]} out"
        )
    for name in given if not options["environment_workers"] else ():
        if name in TIMEOUTS:
            warnings.warn(
                f"{name}={options[name]:g} bounds nothing, because environments run in this process: pass "
                f"environment_workers=, or leave {name} out",
                stacklevel=2,
            )
    max_turn_tokens, max_new_tokens = options["max_turn_tokens"], options["sampling"].max_new_tokens
    if max_turn_tokens is not None and max_turn_tokens > max_new_tokens:
        raise ValueError(
            f"expected max_turn_tokens of at most {max_new_tokens}, the max_new_tokens of sampling, which all answers "
            f"of a conversation have together, got {max_turn_tokens}: raise max_new_tokens, or lower max_turn_tokens"
        )


def check_rewards(functions: Iterable[Any], *, environments: bool) -> None:
    """Refuses a reward of environments where there is none.

    Raises:
        ValueError: naming the option.
    """
    if not environments and any(isinstance(function, EnvironmentReward) for function in functions):
        raise ValueError(
            "expected environment= or tools= for EnvironmentReward, got neither: pass what the policy talks to, or "
            "another reward"
        )


def check_turn_rewards(
    rewards: Mapping[str, tuple[Any, float]], corrections: Corrections, estimator: Estimator
) -> None:
    """Refuses rewards of turns that are no parts of the row's reward, as an estimator takes them for.

    Args:
        rewards: functions with their weights, by name.
        corrections: of the run.
        estimator: that may take turns for what earned them.

    Raises:
        ValueError: naming the estimator and what to pass.
    """
    if not estimator.turn_rewards:
        return
    chosen = f"{estimator.name}(turn_rewards=True)"
    weights = [weight for function, weight in rewards.values() if isinstance(function, EnvironmentReward)]
    if weights != [1.0]:
        raise ValueError(
            f"expected one EnvironmentReward() of weight 1 for {chosen}, whose turns earn what the environment gave, "
            f"got {f'weights {weights}' if weights else 'none'}: add it to rewards="
        )
    for callback in corrections.contributors("reward_bonus"):
        if callback.scales_rewards or callback.compares_rows:
            raise ValueError(
                f"expected rewards that are trained as they are for {chosen}, got {type(callback).__name__}, which "
                "scales those of rows and not of turns: use one without the other"
            )


def check_filters(samplings: Iterable[Sampling | None], engine: Engine) -> None:
    """Refuses filters of evaluations that the engine would ignore, and the lack of one where it records sampling masks
    as lists.

    Raises:
        ValueError: naming them and the engine.
    """
    lists_masks = SAMPLING_MASK in engine.extras and engine.capabilities.lists_masks
    for sampling in samplings:
        if sampling is not None and sampling.temperature > 0 and not sampling.filters and lists_masks:
            raise ValueError(
                f"expected an evaluation that is greedy or filters, as training does, got temperature="
                f"{sampling.temperature} alone: {type(engine).__name__} lists the kept tokens of every request, here "
                "the whole vocabulary for each token; pass top_k=, top_p= or min_p=, or engine=TransformersEngine()"
            )
        if sampling is not None and sampling.filters and not engine.capabilities.filters:
            raise ValueError(
                f"expected an engine that keeps to top_k={sampling.top_k}, top_p={sampling.top_p}, "
                f"min_p={sampling.min_p} of an evaluation, got {type(engine).__name__}, which ignores them: use "
                "engine=TransformersEngine(), or leave them out"
            )


def check_sources(**sources: Any) -> None:
    """Refuses what no model can be built from; only the policy has to be something.

    Raises:
        ValueError: naming the argument and what to pass.
    """
    for name, source in sources.items():
        if (source is None and name != "policy") or (isinstance(source, str | Path) and str(source)):
            continue
        if callable(source) and not isinstance(source, type | nn.Module):
            continue
        got = f"the class {source.__name__}" if isinstance(source, type) else repr(source)
        got = f"a {type(source).__name__} that is built already" if isinstance(source, nn.Module) else got
        raise ValueError(
            f"expected {name} to be the name or path of a causal language model, or a function that builds one, got "
            f"{got}: pass a name, or a function such as lambda: AutoModelForCausalLM.from_config(config)"
        )


def check_parts(*, engine: Any, sampling: Any, value_loss: Any) -> None:
    """Refuses parts that are no objects of their classes.

    Raises:
        ValueError: naming the argument and what to pass.
    """
    examples = {
        "engine": (engine, Engine, "VLLMEngine(), or None for the embedded engine"),
        "sampling": (sampling, Sampling, "Sampling(temperature=1.0, max_new_tokens=256)"),
        "value_loss": (value_loss, ValueLoss, "ValueLoss(coef=0.5)"),
    }
    for name, (part, kind, example) in examples.items():
        if not isinstance(part, kind) and not (name == "engine" and part is None):
            got = f"the class {part.__name__}" if isinstance(part, type) else repr(part)
            raise ValueError(f"expected {name} to be an object such as {example}, got {got}")
    if isinstance(engine, Engine) and not hasattr(engine, "pushed"):
        name = type(engine).__name__
        raise ValueError(
            f"expected engine to know its state and version, got a {name} that does not: call super().__init__() in "
            f"{name}.__init__"
        )
    if not sampling.temperature > 0:
        raise ValueError(
            "expected a temperature > 0 to train with, got 0: greedy answers to a prompt are all alike; an evaluation "
            "may be greedy"
        )


def check_builders(*, optimizer: Any, lr_scheduler: Any) -> None:
    """Refuses optimizers and schedulers that are no functions, which build them from what does not exist yet.

    Raises:
        ValueError: naming the argument and what to pass.
    """
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
    """Refuses a policy that no step would change.

    Raises:
        ValueError: saying so.
    """
    if not groups[0]["params"]:
        raise ValueError(
            "expected a policy with parameters to train, got one whose parameters all have requires_grad=False: leave "
            "some of them on in the function that is passed as policy=, or put adapters around the model"
        )


def check_scheduler(scheduler: Any) -> None:
    """Refuses what ``lr_scheduler=`` built if it does not count optimizer steps.

    Raises:
        ValueError: naming what it built.
    """
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        reads = ", which waits for a metric" if isinstance(scheduler, ReduceLROnPlateau) else ""
        raise ValueError(
            "expected lr_scheduler to build a scheduler of torch.optim.lr_scheduler that counts optimizer steps, such "
            f"as warmup_then_linear(5, 100), got {type(scheduler).__name__}{reads}"
        )


def build_optimizer(builder: OptimizerBuilder, groups: list[dict[str, Any]]) -> Optimizer:
    """What ``optimizer=`` makes of parameter groups.

    Raises:
        ValueError: naming what it built if that is no optimizer, or why it could not.
    """
    try:
        optimizer: Any = builder(groups)
    except TypeError as error:  # torch compares options with numbers
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, but it raised "
            f"TypeError: {error}; options have to be numbers, and YAML takes 1e-6 for a text: write 1.0e-6"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, got {optimizer!r}"
        )
    return optimizer


def check_eos(eos_token_ids: Iterable[int], vocabulary: int) -> None:
    """Refuses ids at the end of a response that the policy never draws.

    Raises:
        ValueError: naming them.
    """
    outside = sorted(i for i in eos_token_ids if not 0 <= i < vocabulary)
    if outside:
        raise ValueError(
            f"expected eos_token_ids in [0, {vocabulary}), the policy's vocabulary, got {outside}: no response could "
            "end with them; pass eos_token_ids= of this policy, or its own tokenizer"
        )


def check_names(known: Iterable[str], **given: Any) -> tuple[str, ...]:
    """The strings of one argument.

    Args:
        known: those it may hold.
        given: the argument.

    Raises:
        ValueError: if it is a single string, or holds something else.
    """
    ((name, names),) = given.items()
    if isinstance(names, str) or not all(isinstance(one, str) for one in names):
        raise ValueError(f'expected {name} to be a list of names, such as ["optimizer"], got {names!r}')
    known = list(known)
    for one in names:
        if one not in known:
            raise ValueError(f"expected {name} to hold names out of {', '.join(known)}, got {one!r}")
    return tuple(names)


def check_rollouts(**given: Any) -> frozenset[int]:
    """The numbers of rollouts in one argument.

    Raises:
        ValueError: if it is a single number, or holds something else.
    """
    ((name, numbers),) = given.items()
    listed: list[Any] = list(numbers) if isinstance(numbers, Collection) and not isinstance(numbers, str) else [None]
    if not all(type(one) is int and one >= 0 for one in listed):
        raise ValueError(f"expected {name} to be a list of numbers of rollouts, such as [7], got {numbers!r}")
    return frozenset(listed)


def check_whole_checkpoint(checkpoint: Mapping[str, Any]) -> None:
    """Refuses weights alone, from which an evaluation may begin and no run goes on."""
    if "lr_schedulers" not in checkpoint:  # sharded strategies keep optimizers elsewhere
        raise ValueError(
            "expected a checkpoint that a run can go on from, got weights alone (save_weights_only=True): pass one of "
            "ModelCheckpoint(save_weights_only=False), or begin anew with RLLightningModule.load_from_checkpoint(...)"
        )


def check_checkpoint(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a checkpoint holds of an RLLightningModule.

    Raises:
        ValueError: if it was written by something else.
    """
    if "lightning_rl" not in checkpoint:
        raise ValueError(
            "expected a checkpoint of an RLLightningModule to resume from or to evaluate, got one of another module: "
            "to begin from the weights of a model, pass its folder as policy="
        )
    return checkpoint["lightning_rl"]


def check_whole_rollouts(tickets: int, steps_per_rollout: int) -> None:
    """Refuses a loader whose epochs end within a rollout; the Trainer's own limits may cut one.

    Raises:
        ValueError: naming both numbers.
    """
    if tickets % steps_per_rollout:
        raise ValueError(
            f"expected a loader with a multiple of {steps_per_rollout} tickets (minibatches x epochs), got {tickets}"
        )


def check_sizes(*, prompts_per_rollout: int, minibatches: int, world_size: int) -> None:
    """Refuses a rollout that does not split evenly.

    Raises:
        ValueError: naming the numbers, and those that would do.
    """
    if prompts_per_rollout % (minibatches * world_size):
        raise ValueError(
            f"expected prompts_per_rollout to be a multiple of minibatches x ranks, got {prompts_per_rollout} for "
            f"{minibatches} x {world_size}: {size_cure(prompts_per_rollout, minibatches * world_size)}"
        )


def size_cure(prompts: int, parts: int) -> str:
    """What to set where the prompts of a rollout do not divide by minibatches x ranks."""
    below = prompts // parts * parts
    near = " or ".join(str(number) for number in (below, below + parts) if number)
    return f"prompts_per_rollout={near}, or other minibatches="


def _reading(algorithm: Algorithm) -> list[tuple[str, tuple[str, ...]]]:
    """Who reads which fields."""
    reading = [(type(c).__name__, (*c.reads, *c.reads_at_loss)) for c in algorithm.corrections.callbacks]
    reading.append((_script_name("loss", algorithm.loss, LOSSES), algorithm.loss.reads))
    reading.append((_script_name("advantages", algorithm.advantages, ESTIMATORS), algorithm.advantages.reads))
    return reading


def _script_name(option: str, chosen: PolicyLoss | Estimator, known: Mapping[str, PolicyLoss | Estimator]) -> str:
    """An option as a script has it: with the name that it was given by, if it was."""
    names = [name for name, one in known.items() if one is chosen]
    return f'{option}="{names[0]}"' if names else f"{option}={chosen.name}"


def _check_extras(readers: Mapping[str, Sequence[str]], algorithm: Algorithm, engine: Engine) -> None:
    """Refuses entries of dict fields that nobody provides, as far as those who provide say what.

    Raises:
        ValueError: naming the reader, the entry, and who could provide it, or both who do.
    """
    providing = algorithm.corrections.contributors("provide")
    known = {f"{field}/{name}" for field in ("token_extras", "prompt_extras") for name in engine.capabilities.extras}
    known |= {f"extras/{GREEDY_SCORE}"} if algorithm.advantages.needs_greedy else set()
    known |= {f"token_extras/{SUM_PI_SQUARED}"} & set(algorithm.advantages.reads)
    for callback in providing:
        if twice := sorted(known & set(callback.provides)):
            raise ValueError(
                f'expected "{twice[0]}" from one place, but {type(callback).__name__} provides it as well: give its '
                "tensor another name, or leave one of them out"
            )
        known |= set(callback.provides)
    if not all(callback.provides for callback in providing):
        return  # one of them may provide anything
    for field, who in readers.items():
        if "/" in field and not field.startswith("task_rewards/") and field not in known:
            raise ValueError(
                f'{who[0]} reads "{field}", but nothing provides it: add a callback whose `provide` returns it, or '
                f"take it out of `reads`; provided: {sorted(known) or 'nothing'}"
            )


def _check_stages(corrections: Corrections) -> None:
    """Refuses fields in ``reads`` that do not exist yet in any of the reader's once-per-rollout methods.

    Raises:
        ValueError: naming the reader, the field, and the methods.
    """
    for callback in corrections.callbacks:
        rows = [name for name, entry in CONTRIBUTIONS.items() if entry.when != "update"]
        methods = [method for method in rows if method in callback.contributes]
        for field in callback.reads:
            early = MADE_AFTER.get(field, ())
            if methods and all(method in early for method in methods):
                raise ValueError(
                    f'{type(callback).__name__} reads "{field}" in {", ".join(methods)}, which comes before {field} '
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
                "with one optimizer step per rollout old_logprobs are the step's own values, so "
                f"{type(callback).__name__} can never act{cure}, or take more steps (minibatches=, epochs=)",
                stacklevel=2,
            )
