"""Export: from a checkpoint to the arguments of a module, and from a policy to a Hugging Face folder."""

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.checkpointing.checksum import UNREADABLE, check_whole, unreadable
from lightning_rl.checkpointing.folder_pickles import check_pickles
from lightning_rl.environments import Conversations
from lightning_rl.losses import Critic
from lightning_rl.policy.build import ModelSource, build_model
from lightning_rl.policy.lora import base_model_of, merge_adapters
from lightning_rl.policy.processor import processor_of
from lightning_rl.policy.text_model import backbone_of
from lightning_rl.rewards import Rewards
from lightning_rl.serialization import ARGUMENTS, CLASS, MAX_ITEMS, describe, is_import_path, path_of, restore
from lightning_rl.utils.atomic_write import apply_umask
from lightning_rl.utils.keys import is_secret

OF_A_RUN = ("advantages", "engine", "environment", "evaluation", "loss", "lr_scheduler", "optimizer", "reduction")
OF_A_RUN += ("reference", "rewards")  # options that an export does not need
GROUPS: dict[str, Any] = {"rewards": Rewards, "critic": Critic, "environment": Conversations}
KEPT = "constructor_arguments"  # attribute of a module of a subclass, and entry of its checkpoints


class LostCodeError(ValueError):
    """Arguments of a run that are code, of which a checkpoint has only the name.

    Args:
        lost: Description of each argument by name.
        form: Form of an argument in the message.
    """

    def __init__(self, lost: Mapping[str, str], form: str = "{}=") -> None:
        names = " and ".join(map(form.format, lost))
        was = "; ".join(f"{name} was {what}" for name, what in lost.items())
        super().__init__(f"expected {names} to be passed, because a checkpoint stores no code: {was}")
        self.lost = lost


def read_checkpoint(path: str | Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Load a checkpoint of this library with ``weights_only=True``.

    Raises:
        ValueError: For the folder of a sharded strategy (the message tells how to consolidate it, unless reading it
            may run code), for other checkpoints, and for a file that is empty, truncated or damaged.
    """
    if Path(path).is_dir():
        check_pickles(Path(path))  # before the message advises to read it
        raise ValueError(f"expected a single-file checkpoint, got the folder {path}: {_consolidation(Path(path))}")
    check_whole(Path(path))
    try:
        checkpoint = torch.load(path, map_location, weights_only=True)
    except UNREADABLE as failure:
        raise ValueError(unreadable(Path(path), failure)) from failure
    if not isinstance(checkpoint, dict) or "lightning_rl" not in checkpoint:
        raise ValueError(
            f"expected a checkpoint of an RLLightningModule, got {path}, which has no such state: pass a file "
            "that trainer.save_checkpoint or ModelCheckpoint wrote"
        )
    if "model" in checkpoint:  # a consolidated FSDP1 folder
        checkpoint["state_dict"] = checkpoint.pop("model")
    return checkpoint


def keep_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of a subclass; the outermost call keeps a description of its arguments for checkpoints."""

    @wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        __class__ = object  # noqa: F841  Lightning's save_hyperparameters follows frames with these two names
        if KEPT not in vars(self):
            positional = _parameters_of(type(self), Parameter.VAR_POSITIONAL)
            vars(self)[KEPT] = _describe_argument(dict(zip(positional, args, strict=False)) | kwargs)
        constructor(self, *args, **kwargs)

    return __init__


def _describe_argument(value: Any) -> Any:
    """Return a plain argument itself, and the description of another one; only its type if that changes the type."""
    if type(value) in (list, tuple) and len(value) <= MAX_ITEMS:
        parts = [_describe_argument(part) for part in value]
        return value if all(map(operator.is_, parts, value)) else parts
    if type(value) is dict:
        return {name: _describe_argument(part) for name, part in value.items() if not is_secret(str(name), part)}
    described = describe(value)
    plain = type(value) is type(described) and (described == value or value != value)
    return value if plain else described if isinstance(described, dict) else {CLASS: path_of(type(value))}


def _parameters_of(kind: type, passed: int) -> list[str]:
    """Return the names of the arguments of a constructor, and of those to which it passes others.

    Args:
        kind: Class of the constructor.
        passed: ``VAR_KEYWORD`` for all arguments; ``VAR_POSITIONAL`` for those by position, in order.
    """
    names = list[str]()
    for base in kind.__mro__:
        parameters = inspect.signature(base).parameters.values()
        before = [one for one in parameters if one.kind < passed and one.kind is not Parameter.VAR_POSITIONAL]
        names += [one.name for one in before]
        if all(one.kind is not passed for one in parameters):
            break
    return list(dict.fromkeys(names))


def restore_module(
    kind: type[LightningModule], path: Any, map_location: Any, arguments: Mapping[str, Any], *, strict: bool, own: bool
) -> Any:
    """Return a module with the weights and options of a checkpoint.

    Its ``lost_code`` has the arguments of a run that were code and were not passed.

    Args:
        kind: Class of the module.
        path: Path of the checkpoint.
        map_location: Device to load the weights to.
        arguments: Constructor arguments that replace those of the run.
        strict: False to accept missing or unexpected weights.
        own: True if the class has another constructor than the library; it gets the arguments of the saved module's.
    """
    checkpoint = read_checkpoint(path, map_location)
    described = checkpoint["lightning_rl"].get("configuration", {}).get("module", {})
    names = {*_parameters_of(kind, Parameter.VAR_KEYWORD)}
    if own and KEPT in checkpoint["lightning_rl"]:
        described = checkpoint["lightning_rl"][KEPT]
        names &= described.keys()
    saved = checkpoint.get(kind.CHECKPOINT_HYPER_PARAMS_KEY, {})
    given = {name: value for name, value in saved.items() if name in names} | dict(arguments)
    options, lost = restore_options({name: described[name] for name in described if name in names}, given)
    if "rewards" in lost:
        options["rewards"] = _no_rewards
    module: Any = kind(**options)
    module.lost_code = lost
    module.load_state_dict(checkpoint["state_dict"], strict=strict)
    return module


def _no_rewards(prompts: Sequence[Any], **_: Any) -> list[None]:
    """Stand in for lost rewards, without which no run begins."""
    return [None] * len(prompts)


def _consolidation(folder: Path) -> str:
    if (folder / ".metadata").exists():
        command = f"python -m lightning.fabric.utilities.consolidate_checkpoint {folder}"
        return f"a sharded strategy wrote it: run {command!r} to write the single file {folder}.consolidated"
    if (folder / "checkpoint").is_dir():
        return "DeepSpeed wrote it: resume with its strategy and call module.save_pretrained on every rank"
    return "pass a file"


def restore_options(
    described: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the arguments of a module's constructor, and the description of those that only a run needs and are lost.

    Args:
        described: Every argument as returned by :func:`lightning_rl.serialization.describe`.
        arguments: Explicit arguments, which take precedence. A source without options, such as
            ``environment=Riddle``, gets the options of the run.

    Raises:
        LostCodeError: Naming every argument of an export that is user code and not passed explicitly.
    """
    options, lost = dict(arguments), dict[str, str]()
    for name, description in described.items():
        if name not in options:
            options |= _restore_all({name: description}, lost)
        elif (kind := GROUPS.get(name)) is not None and not isinstance(options[name], kind | None):
            group, source = dict(_group(description)), fields(kind)[0].name
            if group.pop(source, None) is None:
                continue
            options[name] = kind(options[name], **_restore_all(group, lost, f"{name}."))
    if needed := {name: what for name, what in lost.items() if name not in OF_A_RUN}:
        raise LostCodeError(needed)
    return options, lost


def _restore_all(described: Mapping[str, Any], lost: dict[str, str], place: str = "") -> dict[str, Any]:
    """Return the described arguments by name; add those that are made of code to ``lost``."""
    restored = dict[str, Any]()
    for name, description in described.items():
        try:
            restored[name] = _restore(name, description)
        except ValueError as named:
            lost[f"{place}{name}"] = str(named)
    return restored


def _restore(name: str, description: Any) -> Any:
    """Return a described argument.

    Raises:
        ValueError: With the name of the code that it is made of; the constructor would import a dotted name.
    """
    if name == "tokenizer" and isinstance(description, Mapping) and description.get("path"):
        description = description["path"]
    for value in (description, *(_group(description).values() if name in GROUPS else ())):
        if is_import_path(value):
            raise ValueError(value)
    return restore(description)


def _group(description: Any) -> Mapping[str, Any]:
    """Return the described options of a group; empty for another description."""
    arguments = description.get(ARGUMENTS) if isinstance(description, Mapping) else None
    return arguments if isinstance(arguments, Mapping) else {}


def write_pretrained(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    sources: Mapping[str, ModelSource],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    writing: bool,
) -> None:
    """Write a policy as a Hugging Face folder, and a separate critic with its value head to ``folder/critic``.

    Args:
        folder: Target folder.
        weights: Full tensors of a :class:`PolicyModel`; every rank has to iterate over them.
        sources: Sources of the ``"policy"`` and ``"critic"`` models.
        tokenizer: Tokenizer to save with the model, and with its processor of pictures.
        writing: True on the one rank that writes.

    Raises:
        ValueError: On every rank, if the folder is a file or a weight is not finite.
    """
    if folder.is_file():
        raise ValueError(f"expected a folder to write, got the file {folder}: pass another path")
    whole = _finite_copies(weights, keeps=writing)
    if not writing:
        return
    processor = processor_of(tokenizer)
    for prefix, source, place in (("model.", "policy", folder), ("critic.", "critic", folder / "critic")):
        part = {name.removeprefix(prefix): weight for name, weight in whole.items() if name.startswith(prefix)}
        if part:
            model = build_model(sources[source], head=source == "policy", whole=processor is not None)
            _load(base_model_of(model) if source == "policy" else backbone_of(model), part)
            _fix_parametrizations(merge_adapters(model)).save_pretrained(place)
    if "value_head.weight" in whole:
        (folder / "critic").mkdir(parents=True, exist_ok=True)
        save_file({"weight": whole["value_head.weight"]}, folder / "critic" / "value_head.safetensors")
    for file in (*folder.glob("*.safetensors"), *folder.glob("critic/*.safetensors")):
        apply_umask(file)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder) if processor is None else processor.save(folder)


def _finite_copies(weights: Iterable[tuple[str, Tensor]], *, keeps: bool) -> dict[str, Tensor]:
    """Return copies of the weights on the CPU if ``keeps``, after checking on every rank that all are finite."""
    whole, broken = dict[str, Tensor](), list[str]()
    for name, weight in weights:
        broken += [] if bool(torch.isfinite(weight).all()) else [name]
        whole |= {name: weight.cpu().clone()} if keeps else {}
    if broken:
        raise ValueError(
            f"expected finite weights, got NaN or infinity in {broken[0]}"
            f"{f' and {len(broken) - 1} others' if broken[1:] else ''}: export an earlier checkpoint"
        )
    return whole


def _fix_parametrizations(model: PreTrainedModel) -> PreTrainedModel:
    """Replace parametrized weights, such as those of ``weight_norm``, by their values, which every reader loads."""
    for part in model.modules():
        for name in list(cast(Any, part).parametrizations) if parametrize.is_parametrized(part) else ():
            parametrize.remove_parametrizations(part, name)
    return model


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        parameters[name].copy_(weight)
