"""Building policy, critic, reference and tokenizer from a name, a path or a callable."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rl.description import import_by_name
from lightning_rl.policy.attention import AUTO
from lightning_rl.policy.lora import base_model_of
from lightning_rl.policy.model import PolicyModel, check_dropout, check_scoring
from lightning_rl.policy.packing import PACKED_ATTENTION
from lightning_rl.policy.text_model import auto_class_of, freeze_towers, text_model_of
from lightning_rl.policy.weight_files import WeightFiles, model_without_numbers

AROUND = ("_orig_mod.", "module.")  # how names begin in what torch.compile and data parallelism put around a model


class ModelBuilder(ABC):
    """Builds a model: the base of a class that a configuration file names, with options, which functions lack there.

    Example:
        >>> class Untrained(ModelBuilder):
        ...     def __init__(self, layers: int = 2) -> None:
        ...         self.layers = layers
        ...
        ...     def __call__(self) -> PreTrainedModel:
        ...         from transformers import Qwen2Config, Qwen2ForCausalLM
        ...
        ...         return Qwen2ForCausalLM(Qwen2Config(num_hidden_layers=self.layers))
    """

    @abstractmethod
    def __call__(self) -> PreTrainedModel:
        """A model, new at each call."""


ModelSource = ModelBuilder | Callable[[], PreTrainedModel] | str | Path  # in the order that configuration files try
CRITIC_HINT = ' (critic="shared" is a value head on the policy)'
TokenizerSource = str | Path | PreTrainedTokenizerBase


def build_model(source: ModelSource, hint: str = "", *, head: bool = True) -> PreTrainedModel:
    """A causal language model, loaded in the default dtype (float32, or what a ``-true`` precision sets).

    Args:
        source: of the model.
        hint: what the message says besides, if it cannot be loaded.
        head: whether the weights of a name or folder have to hold its vocabulary head, and nothing that it has no
            place for.

    Raises:
        ValueError: if a name or folder cannot be loaded, or its weights are not those that its configuration names,
            all and in their shapes: transformers would draw the others by lot, or leave out what it does not know.
    """
    if isinstance(source, str | Path):
        if missing := missing_folder(source):
            raise ValueError(f"expected the folder of a causal language model, got {missing}{hint}")
        try:
            return _load(source, head=head)
        except (OSError, SafetensorError) as error:  # what transformers raises where it cannot load
            file = _unreadable_file(Path(source)) if isinstance(error, SafetensorError) else ""
            raise ValueError(
                f"expected the name or folder of a causal language model that can be loaded, got {str(source)!r}: "
                f"{file}{str(error).splitlines()[0]}{hint}"
            ) from error
    model = source()
    if not isinstance(model, nn.Module):  # of transformers, or one that peft put around it
        raise ValueError(f"expected a function that builds a model of transformers, got {type(model).__name__}")
    if any(name.startswith(AROUND) for name, _ in model.named_parameters()):
        raise ValueError(
            f"expected a model of transformers, got {type(model).__name__} around it, under which its weights have "
            "other names: return the model itself; compile=True compiles it, and a strategy of the Trainer splits it"
        )
    return _check_head(model)


def _load(source: str | Path, *, head: bool) -> PreTrainedModel:
    """The text model of a name or folder, all of whose weights were read, and with them all that lie there.

    Raises:
        ValueError: if some were not; the message names the first.
    """
    try:
        loaded: Any = _auto_class(source).from_pretrained(
            source,
            dtype=torch.get_default_dtype(),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
        )
    except ValueError as error:
        raise ValueError(_own_code(source, error)) from error
    model, report = cast(tuple[PreTrainedModel, Any], loaded)
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        raise ValueError(
            f"expected the weights in {str(source)!r} to be those of its configuration, got {len(mismatched)} of other "
            f"shapes, such as {name}, {list(stored)} where {list(needed)} is needed: are they another model's?"
        )
    if missing := sorted(set(report["missing_keys"]) - (set() if head else _head_names(model))):
        raise ValueError(
            f"expected the weights in {str(source)!r} to be all of the model, got none for {missing[0]}"
            f"{f' and {len(missing) - 1} others' if missing[1:] else ''}, which would be drawn by lot: load a "
            "checkpoint that has them, or pass a function that builds the model as you want it"
        )
    if head and (left := sorted(report["unexpected_keys"])):
        raise ValueError(
            f"expected the weights in {str(source)!r} to be those of its configuration, got {left[0]}"
            f"{f' and {len(left) - 1} others' if left[1:] else ''}, which {type(model).__name__} has no place for: "
            "correct config.json, or pass a function that builds the model as you want it"
        )
    return _check_head(text_model_of(model))


def _check_head(model: PreTrainedModel) -> PreTrainedModel:
    if base_model_of(model).get_output_embeddings() is None:
        raise ValueError(
            f"expected a causal language model, got {type(model).__name__}, which has no vocabulary head: pass a "
            "function that builds the part of it that has one"
        )
    return model


def _auto_class(source: str | Path) -> Any:
    try:
        return auto_class_of(AutoConfig.from_pretrained(source, trust_remote_code=False))
    except OSError:
        return AutoModelForCausalLM  # which says what is missing


def _head_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters of the vocabulary head."""
    head = model.get_output_embeddings()
    own = set() if head is None else set(head.parameters())
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in own}


def _unreadable_file(folder: Path) -> str:
    """The first file of safetensors in a folder that cannot be opened, for a message; transformers does not say."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return f"{path}: "
    return ""


def build_policy(
    policy: ModelSource,
    critic: ModelSource | None,
    *,
    temperature: float,
    packed: bool,
    attention: str = AUTO,
    checkpointing: bool = False,
    split: bool = False,
) -> PolicyModel:
    """Policy and critic, checked: no dropout, and our forward agrees with the model's own.

    Args:
        policy: where it comes from.
        critic: the same of the critic, ``"shared"``, or None.
        temperature: of the policy.
        packed: whether microbatches go through it without padding.
        attention: the kernel that packed sequences attend in.
        checkpointing: whether it runs again in the backward.
        split: build the policy without numbers if it comes from a folder and has no critic of its own;
            :meth:`PolicyModel.fill` reads and checks it once it is split.

    Raises:
        ValueError: if either check fails; the message says what to change.
    """
    model, files = _model_and_files(policy, split=split and critic in (None, "shared"))
    model = base_model_of(model)
    freeze_towers(model)
    backbone = None if critic is None else model if critic == "shared" else build_model(critic, CRITIC_HINT, head=False)
    check_dropout(model)
    built = PolicyModel(model, backbone, temperature=temperature, packed=packed, attention=attention, files=files)
    if files is None:
        check_scoring(model, packed=packed)
    if backbone is not None and backbone is not model:
        check_dropout(backbone)
        check_scoring(backbone, packed=packed)
    for part in {model, backbone or model} if checkpointing else ():
        enable = getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return built.train()  # transformers checkpoints activations in train mode only; there is no dropout


def build_reference(
    reference: ModelSource | None,
    policy: ModelSource,
    unmoved: PreTrainedModel | None,
    *,
    packed: bool,
    split: bool = False,
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """The frozen model of a reference, in eval mode and checked like the policy, and what it is still to be read from.

    Args:
        reference: where it comes from; None for the policy before its first step.
        policy: where the policy came from.
        unmoved: the policy, if it has not trained yet; it is copied.
        packed: whether it scores without padding.
        split: build it without numbers if it comes from a folder.
    """
    if reference is None and unmoved is not None and unmoved.device.type != "meta":
        return check_frozen(copy.deepcopy(unmoved), packed=packed), None
    model, files = _model_and_files(policy if reference is None else reference, split=split)
    if files is None:
        return check_frozen(model, packed=packed), None
    check_dropout(model)
    return model.eval(), files


def _model_and_files(source: ModelSource, *, split: bool) -> tuple[PreTrainedModel, WeightFiles | None]:
    return (model_without_numbers(source) if split else None) or (build_model(source), None)


def check_frozen(model: PreTrainedModel, *, packed: bool) -> PreTrainedModel:
    """The model in eval mode, checked like the policy.

    Raises:
        ValueError: if it has dropout, or our forward does not agree with its own.
    """
    check_dropout(model)
    if packed:
        model.set_attn_implementation(PACKED_ATTENTION)
    check_scoring(model, packed=packed)
    return model.eval()


def build_tokenizer(tokenizer: TokenizerSource | None, policy: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer given, by itself or by the dotted name of it or of a function that makes it, or the one that lies
    beside a policy given by name or path.
    """
    named: Any = import_by_name(tokenizer=tokenizer)
    if named is not tokenizer:
        tokenizer = named if isinstance(named, PreTrainedTokenizerBase) or not callable(named) else cast(Any, named())
    argument = "tokenizer" if tokenizer is not None else "policy"
    if tokenizer is None and isinstance(policy, str | Path):
        tokenizer = policy
    if tokenizer is not None and not isinstance(tokenizer, str | Path | PreTrainedTokenizerBase):
        raise ValueError(
            f"expected tokenizer to be a tokenizer of transformers, or the name or folder of one, got {tokenizer!r}"
        )
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if missing := missing_folder(tokenizer):
        raise ValueError(f"expected {argument}= to be a folder that is there, or a name of the hub, got {missing}")
    try:
        return AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(_own_code(tokenizer, error)) from error
    except OSError as error:
        raise ValueError(
            f"expected {argument}= to be the name or folder of a tokenizer that can be loaded, got {str(tokenizer)!r}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def missing_folder(source: str | Path) -> str:
    """What is wrong with the path of a folder that is not there; empty if it is, or if it may be a name of the hub.

    A name of the hub has at most one slash; a path, or what begins with a dot, a slash or a tilde, has to be a folder.
    """
    text, path = str(source), Path(source)
    if path.exists() or not (isinstance(source, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1):
        return ""
    beside = [folder.name for folder in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    return f"{text!r}, which does not exist{f': did you mean {str(path.parent / near[0])!r}?' if near else ''}"


def eos_ids_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    eos_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
) -> frozenset[int]:
    """Every id that ends a response: ``eos_token_ids``, or the generation config's (maybe several) and the tokenizer's.

    Raises:
        ValueError: if there is none, and no stop string either, so that no response could ever end.
    """
    configured = None if model.generation_config is None else model.generation_config.eos_token_id
    ids = set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    if tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    ids = ids if eos_token_ids is None else set(eos_token_ids)
    if not ids and not stop:
        who = "neither model nor tokenizer has an EOS" if eos_token_ids is None else "eos_token_ids is empty"
        raise ValueError(f"expected an end of responses, but {who}: pass eos_token_ids= or stop=")
    return frozenset(ids)


def max_prompt_length(model: PreTrainedModel, max_new_tokens: int) -> int | None:
    """How many tokens a prompt may have to leave room for a whole response; None for a model without a context limit.

    Raises:
        ValueError: if there is no room for any prompt.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and context <= max_new_tokens:
        raise ValueError(f"expected max_new_tokens below the context window of {context}, got {max_new_tokens}")
    return None if context is None else context - max_new_tokens


def _own_code(source: str | Path, error: ValueError) -> str:
    """What is said of a name or folder that transformers refuses, most often because it brings code of its own."""
    return (
        f"expected a model or tokenizer that transformers itself can load, got {str(source)!r}: "
        f"{str(error).splitlines()[0]} (code that lies beside weights is never run; if you have read and trust it, "
        "pass a function that loads it with trust_remote_code=True)"
    )
