"""Resolution and checks of the module's arguments, of Trainer flags, optimizers and checkpoints."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.advantages import ESTIMATORS, resolve_advantages
from lightning_rl.algorithm import Algorithm
from lightning_rl.checkpointing.optimizer_options import (
    ConfiguredOptimizer,
    describe_optimizer,
    options_of,
    rates,
    schedule_end,
)
from lightning_rl.distributed import parallel_of
from lightning_rl.environments import Conversations, EnvironmentReward
from lightning_rl.generation import Engine, SamplingParams, TransformersEngine
from lightning_rl.losses import LOSSES, Critic, resolve_loss
from lightning_rl.optimizers import OptimizerBuilder, SchedulerBuilder
from lightning_rl.options import Options
from lightning_rl.policy import ModelOptions
from lightning_rl.policy.build import build_tokenizer
from lightning_rl.rewards import Rewards
from lightning_rl.serialization import import_by_name
from lightning_rl.signal.reductions import REDUCTIONS, resolve_reduction
from lightning_rl.testing.properties.fixed_batch import ROWS, judge_fixed_batch, skipped_checks
from lightning_rl.utils.arguments import check_counts, check_numbers, check_signature
from lightning_rl.utils.naming import check_hooks, name_of
from lightning_rl.utils.places import MODULE, check_place
from lightning_rl.utils.trainer import callbacks_of

NAMES: dict[str, Collection[str]] = {"advantages": ESTIMATORS, "loss": LOSSES, "reduction": REDUCTIONS}
SIGNATURES: dict[str, Sequence[str]] = {
    "advantages": ("scores", "groups", "rewarded"),
    "loss": ("view",),
    "reduction": ("valid_tokens", "trained", "groups", "global_sum"),
    "optimizer": ("groups",),
    "lr_scheduler": ("optimizer",),
}
MAX_SCHEDULE = 20_000  # steps of a fit for which a schedule is followed, in about 0.2 seconds


FLAGS: tuple[tuple[Callable[[Trainer], object], str], ...] = (
    (
        lambda trainer: getattr(trainer.strategy.launcher, "_start_method", None),
        "expected a strategy whose processes are started from the command line, got one of {got!r}, such as "
        "ddp_notebook, which Lightning takes in a notebook with several devices: the trained policy would end with its "
        'processes; use devices=1, or run a script with strategy="ddp"',
    ),
    (
        lambda trainer: getattr(trainer.lightning_module, "_compiler_ctx", None),
        "expected a module that is not compiled, got torch.compile(module): pass the module, and "
        "model=ModelOptions(compile=True)",
    ),
    (
        lambda trainer: trainer.gradient_clip_val,
        "expected Trainer without gradient_clip_val, got {got}: pass max_grad_norm= to RLLightningModule",
    ),
    (
        lambda trainer: trainer.accumulate_grad_batches if trainer.accumulate_grad_batches != 1 else None,
        "expected Trainer without accumulate_grad_batches, got {got}: max_tokens_per_microbatch= of ModelOptions "
        "splits a step into microbatches",
    ),
    (
        lambda trainer: trainer.precision == "16-true",
        'expected a precision for training, got Trainer(precision="16-true"), which loses small weight updates and '
        'overflows gradients: use "bf16-mixed", "16-mixed" or "32-true"',
    ),
)
"""Refused flags: a function that returns a true value for them, and the message."""
CALLBACKS: dict[type[Callback], str] = {
    StochasticWeightAveraging: "expected Trainer without StochasticWeightAveraging, which copies the module before the "
    "policy is built: use lightning.pytorch.callbacks.WeightAveraging or EMAWeightAveraging",
    LearningRateFinder: "expected a fit, got lr_find (LearningRateFinder), which needs a decreasing loss, but a policy "
    "gradient loss does not decrease: choose lr= of the optimizer, 1e-6 to 1e-5 for full fine-tuning, and watch "
    "reward/task and optim/grad_norm",
    BatchSizeFinder: "expected a fit, got scale_batch_size (BatchSizeFinder), which needs a batch size: bound memory "
    "with max_tokens_per_microbatch= of ModelOptions for updates, and max_rows= of the engine for generation",
}
"""Refused callbacks and their messages."""


def check_flags(trainer: Trainer) -> None:
    """Raise ValueError for Trainer flags and callbacks that manual optimization does not support."""
    for flag, message in FLAGS:
        if got := flag(trainer):
            raise ValueError(message.format(got=got))
    _check_loggers(trainer)
    for callback in callbacks_of(trainer):
        if not isinstance(callback, Callback):
            callbacks_of(trainer).remove(callback)  # Lightning would call it while handling the error
        _check_callback(callback)
        check_hooks(type(callback), Callback)
        for kind, message in CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(message)
        if isinstance(callback, WeightAveraging) and parallel_of(trainer.strategy).sharded:
            raise ValueError(
                f"expected Trainer without {type(callback).__name__} under a strategy that shards the policy, got "
                f"{type(trainer.strategy).__name__}: it averages whole weights, so use DDP, or remove it"
            )
        if isinstance(callback, ModelCheckpoint):
            _check_checkpoint_options(callback)


def _check_loggers(trainer: Trainer) -> None:
    """Raise ValueError for a name or class as logger, and for two of one class with one folder, written twice."""
    for logger in trainer.loggers:
        if isinstance(logger, type) or not hasattr(logger, "log_metrics"):
            trainer.loggers = []  # Lightning would call them while handling the error
            check_place("logger= of Trainer", logger)
            got = f"a {type(logger).__name__}: pass an object, True for the default logger, or False"
            got = f"the class {logger.__name__}: call it" if isinstance(logger, type) else got
            raise ValueError(f"expected logger to be a logger such as CSVLogger(folder), got {got}")
    folders = [(type(logger).__name__, logger.log_dir) for logger in trainer.loggers if logger.log_dir is not None]
    for name, folder in folders:
        if folders.count((name, folder)) > 1:
            raise ValueError(
                f"expected a folder for each {name}, got {folder} for {folders.count((name, folder))} of them: pass "
                "another name= or version= to each, or remove one"
            )


def _check_checkpoint_options(callback: ModelCheckpoint) -> None:
    """Raise ValueError for an interval in time, and a file name in which a metric is a folder."""
    if callback._train_time_interval is not None:  # noqa: SLF001
        raise ValueError(
            "expected ModelCheckpoint without train_time_interval, with which Lightning saves nothing under manual "
            "optimization: pass every_n_train_steps="
        )
    name = callback.filename or ""
    written = name if callback.auto_insert_metric_name else re.sub(r"{[^{}]*}", "", name)
    if "/" in written:
        plain = re.sub(r"{([^{}:]*/)?([^{}:/]*)([^{}]*)}", lambda field: f"{field[2]}={field[0]}", name)
        raise ValueError(
            f"expected ModelCheckpoint to write into its folder, got filename={name!r}, in which a slash makes one: "
            f"pass filename={plain.replace('}/', '}-')!r} with auto_insert_metric_name=False"
        )


def _check_callback(callback: Any) -> None:
    """Raise ValueError unless an item of ``Trainer(callbacks=)`` is a callback."""
    check_place("callbacks= of Trainer", callback)
    if isinstance(callback, type):
        raise ValueError(f"expected callbacks to be objects, got the class {callback.__name__}: call it")
    if not isinstance(callback, Callback):
        got, cure = name_of(callback), "remove it"
        if isinstance(callback, str):
            got, cure = repr(callback), "pass an object, such as NoEOSMask()"
        elif any(kind.__module__.startswith("pytorch_lightning.") for kind in type(callback).__mro__):
            got, cure = f"{got} of pytorch_lightning", "import from lightning.pytorch"
        raise ValueError(f"expected callbacks to be callbacks of Lightning, got {got}: {cure}")


def _check_length(builder: Callable[[Optimizer], LRScheduler], optimizer: Optimizer, steps: float) -> None:
    end = schedule_end(builder, optimizer, int(steps)) if steps <= MAX_SCHEDULE else None
    if end is not None:
        rank_zero_warn(
            f"the schedule of lr_scheduler= ends after {end} optimizer steps, where the learning rate is 0, and the "
            f"fit has {int(steps)}: give the schedule the number of steps of the fit"
        )


@rank_zero_only
def warn_of_broken_properties(algorithm: Algorithm) -> None:
    """Warn of each property that the algorithm of a run does not have on a fixed batch, and log the skipped ones."""
    verdict = judge_fixed_batch(algorithm, algorithm.corrections.callbacks)
    for finding in verdict.findings:
        rank_zero_warn(f"on a fixed batch of {len(ROWS)} rows, {finding}")
    for line in skipped_checks(verdict):
        rank_zero_info(f"on a fixed batch of {len(ROWS)} rows, {line}")


def resolve_options(**given: Any) -> Options:
    """Return the options of a module for the arguments of its constructor, with names and defaults replaced by objects.

    Raises:
        ValueError: If an argument is out of range or a name unknown.
    """
    for name, part in given.items():
        check_place(f"{name}={MODULE}", part)
    _check_names(**{name: given[name] for name in NAMES})
    sampling = given["sampling"]
    names = "group_size", "minibatches_per_rollout", "epochs_per_rollout", "mismatch_every_n_rollouts"
    check_counts(1, **{name: given[name] for name in names})
    check_counts(0, max_staleness=given["max_staleness"], seed=given["seed"])
    check_numbers(above=0, finite=True, optional=True, max_grad_norm=given["max_grad_norm"])
    check_parts(engine=given["engine"], sampling=sampling, model=given["model"])
    check_builders(optimizer=given["optimizer"], lr_scheduler=given["lr_scheduler"])
    given |= {name: import_by_name(**{name: given[name]}) for name in (*NAMES, "policy", "reference")}
    for name, arguments in SIGNATURES.items():
        if name not in NAMES or not isinstance(given[name], type):
            check_signature(name, given[name], *arguments)
    rewards, critic = Rewards.of(given["rewards"]), Critic.of(given["critic"])
    conversations = Conversations.of(given["environment"])
    critic = critic and replace(critic, source=import_by_name(critic=critic.source))
    check_sources(policy=given["policy"], reference=given["reference"], critic=critic and critic.source)
    if conversations is not None:
        conversations = conversations.resolve()
        if (conversations.max_turn_tokens or 0) > sampling.max_new_tokens:
            raise ValueError(
                f"expected max_turn_tokens of at most {sampling.max_new_tokens}, the max_new_tokens of sampling for a "
                f"whole conversation, got {conversations.max_turn_tokens}: raise max_new_tokens, or lower "
                "max_turn_tokens"
            )
    check_rewards([function for function, _ in rewards.sources.values()], has_environments=conversations is not None)
    given |= {"rewards": rewards, "critic": critic, "environment": conversations}
    given |= {"advantages": resolve_advantages(given["advantages"]), "loss": resolve_loss(given["loss"])}
    given |= {"reduction": resolve_reduction(given["reduction"], sampling.max_new_tokens)}
    given |= {"tokenizer": build_tokenizer(given["tokenizer"], given["policy"])}
    given["engine"] = given["engine"] or TransformersEngine()
    return Options(**given)


def _check_names(**names: Any) -> None:
    """Raise ValueError for a name that another argument takes."""
    for option, name in names.items():
        known = {other for other, table in NAMES.items() if isinstance(name, str) and name in table}
        if known and option not in known:
            raise ValueError(f'expected another name for {option}=, got "{name}": pass it as {min(known)}="{name}"')


FIRST_MESSAGE = re.compile(r"""(\w+(?:\[\w+\])?)\[0\]\[["']content["']\]""")
OTHER_MESSAGES = ("prompt", "message", "conversation", "talk")  # names of variables that hold no completion


def check_rewards(functions: Iterable[Any], *, has_environments: bool) -> None:
    """Raise ValueError for an EnvironmentReward without environments, and for one that reads the first answer alone."""
    for function in functions if has_environments else ():
        check_answer(function)
    if not has_environments and any(isinstance(function, EnvironmentReward) for function in functions):
        raise ValueError(
            "expected environment= for EnvironmentReward, got none: pass an environment, or another reward"
        )


def check_answer(function: Any) -> None:
    """Raise ValueError for a reward of conversations whose source reads the first message of a completion."""
    try:
        source = inspect.getsource(function if inspect.isroutine(function) else type(function))
    except (OSError, TypeError):
        return
    read = next((name for name in FIRST_MESSAGE.findall(source) if not name.startswith(OTHER_MESSAGES)), None)
    if read is not None:
        raise ValueError(
            f"expected a reward that reads the last answer of a conversation, got {name_of(function)}, which reads "
            f'{read}[0]["content"], the first one: write {read}[-1]["content"], or read all messages'
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


def check_parts(*, engine: Any, sampling: Any, model: Any) -> None:
    """Raise ValueError unless each part is an instance of its class."""
    examples = {
        "engine": (engine, Engine, "VLLMEngine(), or None for the embedded engine"),
        "sampling": (sampling, SamplingParams, "SamplingParams(temperature=1.0, max_new_tokens=256)"),
        "model": (model, ModelOptions, "ModelOptions(packing=False)"),
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
    sampling.check_random("training")


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


def build_optimizers(
    builder: OptimizerBuilder,
    scheduler_builder: SchedulerBuilder | None,
    groups: list[dict[str, Any]],
    names: Mapping[int, str],
    steps: float,
) -> tuple[dict[str, Any], ConfiguredOptimizer]:
    """Return optimizer and scheduler in the form of ``configure_optimizers``, and the options of the optimizer.

    Args:
        builder: Function that builds the optimizer.
        scheduler_builder: Function that builds the scheduler, or None.
        groups: Parameter groups.
        names: Name of each parameter by its id.
        steps: Number of optimizer steps of the fit; infinity if unknown.

    Warns of a schedule whose learning rate reaches 0, or which ends, before the last step, and of an optimizer that
    lacks some of the parameters.

    Raises:
        ValueError: If nothing can be trained, a builder returns something else, or the optimizer has other parameters
            or maximizes the loss.
    """
    if not groups[0]["params"]:
        raise ValueError(
            "expected a policy with trainable parameters, got requires_grad=False for all of them: enable some in the "
            "function that is passed as policy=, or add adapters to the model"
        )
    trained = {id(one) for group in groups for one in group["params"]}
    optimizer = _build_optimizer(builder, groups)
    _check_parameters(optimizer, trained)
    optimizer.register_step_pre_hook(call_closure)
    for group in optimizer.param_groups:  # schedules write to rates that are tensors in place
        group.update({name: value.clone() for name, value in group.items() if isinstance(value, Tensor)})
    built: dict[str, Any] = {"optimizer": optimizer}
    description: dict[str, Any] = {**describe_optimizer(optimizer, names), "rates": None}
    if scheduler_builder is not None:
        build = partial(_build_scheduler, scheduler_builder)
        description["rates"] = rates(build, optimizer)
        _check_length(build, optimizer, steps)
        built["lr_scheduler"] = build(optimizer)
    return built, ConfiguredOptimizer(description, options_of(optimizer))


def _check_parameters(optimizer: Optimizer, trained: Collection[int]) -> None:
    """Raise ValueError for an optimizer without any of the trainable parameters, and warn of one that lacks some.

    Args:
        optimizer: Optimizer of the user.
        trained: Id of each trainable parameter.
    """
    missing = {*trained} - {id(one) for group in optimizer.param_groups for one in group["params"]}
    cure = "pass all groups that the function gets as its argument to the optimizer"
    if len(missing) == len(trained):
        raise ValueError(
            f"expected an optimizer of the policy's parameters, got {type(optimizer).__name__} with none of the "
            f"{len(trained)} trainable ones, which would train nothing: {cure}"
        )
    if missing:
        rank_zero_warn(
            f"{len(missing)} of {len(trained)} trainable parameters are in no group of the optimizer, so they keep "
            f"their values: {cure}, or set their requires_grad=False in the function that is passed as policy="
        )


def call_closure(_: Optimizer, arguments: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Call the closure of an optimizer step before the step, which may ignore it.

    In the closure Lightning calls the hooks before the step, and the module clips the gradient.
    """
    if (closure := keywords.get("closure")) is None:
        return None
    result = closure()
    return arguments, {**keywords, "closure": lambda: result}


def _build_scheduler(builder: SchedulerBuilder, optimizer: Optimizer) -> LRScheduler:
    scheduler = builder(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau) or not isinstance(scheduler, LRScheduler):
        reads = ", which waits for a metric" if isinstance(scheduler, ReduceLROnPlateau) else ""
        raise ValueError(
            "expected lr_scheduler to build a scheduler of torch.optim.lr_scheduler that counts optimizer steps, such "
            f"as warmup_then_linear(5, 100), got {type(scheduler).__name__}{reads}"
        )
    return scheduler


def _build_optimizer(builder: OptimizerBuilder, groups: list[dict[str, Any]]) -> Optimizer:
    try:
        optimizer: Any = builder(groups)
    except (TypeError, AttributeError) as error:  # torch compares options with numbers
        cure = "its argument is a list of parameter groups: pass it on, as in partial(AdamW, lr=1e-6)"
        if "'str'" in str(error):
            cure = "options must be numbers, but YAML reads 1e-6 as a string: write 1.0e-6"
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, but it raised "
            f"{type(error).__name__}: {error}; {cure}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"expected optimizer to build a torch.optim.Optimizer from a list of parameter groups, got {optimizer!r}"
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            f"expected an optimizer that minimizes the loss, got {type(optimizer).__name__} with maximize=True, which "
            "lowers the reward: remove it"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            "expected an optimizer that takes a step with one gradient, got "
            f"{type(optimizer).__name__}, whose step calls a closure for the loss several times: use AdamW or SGD"
        )
    return optimizer


def check_changes(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError if a name in ``allow_config_changes`` is not an option of the run."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"expected allow_config_changes to contain only {', '.join(known)}, got {name!r}")


def check_whole_checkpoint(checkpoint: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint holds weights alone, or no state of a fit, from which a run cannot resume."""
    if "lr_schedulers" not in checkpoint:  # sharded strategies keep optimizers elsewhere
        raise ValueError(
            "expected a checkpoint to resume from, got weights alone (save_weights_only=True): pass one of "
            "ModelCheckpoint(save_weights_only=False), or start a new run with "
            "RLLightningModule.load_from_checkpoint(...)"
        )
    if not checkpoint["lightning_rl"].get("fits", True):
        raise ValueError(
            "expected a checkpoint of a Trainer that fits, got one that a Trainer saved after nothing but an "
            "evaluation: save it by the Trainer of the fit, or start a new run with "
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
