"""Construction of policy, critic, reference and tokenizer from a name, a path or a callable."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from lightning_rl.policy.activation_checkpointing import Checkpointing, checkpoint_layers
from lightning_rl.policy.attention import AUTO
from lightning_rl.policy.context_window import context_window, depends_on_batch
from lightning_rl.policy.lora import base_model_of, check_adapters
from lightning_rl.policy.model import (
    FrozenModel,
    PolicyModel,
    check_dropout,
    check_forward,
    check_head,
    check_router_loss,
)
from lightning_rl.policy.processor import PictureProcessor, attach
from lightning_rl.policy.roles import TRAINED, Role, name_role
from lightning_rl.policy.text_model import auto_class_of, freeze_towers, text_model_of
from lightning_rl.policy.weight_files import WeightFiles, model_without_numbers
from lightning_rl.serialization import import_by_name

HALVES = torch.bfloat16, torch.float16
AROUND = ("_orig_mod.", "module.")  # prefixes of names in a model wrapped by torch.compile or data parallelism


class ModelBuilder(ABC):
    """Base class of callables with options that build a model, for use in configuration files.

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
        """Return a new model."""


ModelSource = ModelBuilder | Callable[[], PreTrainedModel] | str | Path  # in the order of attempts
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
CRITIC_HINT = ' (critic="shared" is a value head on the policy)'
TokenizerSource = str | Path | PreTrainedTokenizerBase | ProcessorMixin


def build_model(source: ModelSource, hint: str = "", *, head: bool = True, whole: bool = False) -> PreTrainedModel:
    """Return a causal language model in the default dtype (float32, or that of a ``-true`` precision).

    A model that a callable builds keeps its dtype, unless it trains in half precision and the default is not one:
    transformers loads a checkpoint in bfloat16 as bfloat16.

    Args:
        source: Name, folder or callable.
        hint: Text appended to the message if it cannot be loaded.
        head: True if the weights have to include the vocabulary head and no unknown tensors.
        whole: True to keep the towers of a multimodal model.

    Raises:
        ValueError: If a name or folder cannot be loaded, or its weights do not match its configuration: transformers
            would initialize missing weights randomly and ignore unknown ones.
    """
    if isinstance(source, str | Path):
        if missing := missing_folder(source):
            raise ValueError(f"expected the folder of a causal language model, got {missing}{hint}")
        try:
            return _load(source, head=head, whole=whole)
        except (OSError, SafetensorError) as error:  # raised by transformers for unreadable files
            file = _unreadable_file(Path(source)) if isinstance(error, SafetensorError) else ""
            raise ValueError(
                f"expected the name or folder of a causal language model that can be loaded, got {str(source)!r}: "
                f"{file}{str(error).splitlines()[0]}{hint}"
            ) from error
    model = source()
    if not isinstance(model, nn.Module):  # of transformers, or wrapped by peft
        raise ValueError(f"expected a function that builds a model of transformers, got {type(model).__name__}")
    if any(name.startswith(AROUND) for name, _ in model.named_parameters()):
        raise ValueError(
            f"expected a model of transformers, got {type(model).__name__} around it, which changes the names of its "
            "weights: return the model itself; compile=True compiles it, and a strategy of the Trainer shards it"
        )
    dtype, trained = torch.get_default_dtype(), {part.dtype for part in model.parameters() if part.requires_grad}
    if dtype not in HALVES and trained & {*HALVES}:
        nn.Module.to(model, dtype)  # that of transformers refuses quantized models
    return _check_head(cast(PreTrainedModel, model))


def _load(source: str | Path, *, head: bool, whole: bool) -> PreTrainedModel:
    """Return the model, or its text model, of a name or folder after checking that all weights were loaded.

    Raises:
        ValueError: If some were not; names the first one.
    """
    try:
        loaded: Any = _auto_class(source).from_pretrained(
            source,
            dtype=torch.get_default_dtype(),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the loading info
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
            f"{f' and {len(missing) - 1} others' if missing[1:] else ''}, which would be initialized randomly: load a "
            "checkpoint that has them, or pass a function that builds the model as you want it"
        )
    if head and (left := sorted(report["unexpected_keys"])):
        raise ValueError(
            f"expected the weights in {str(source)!r} to be those of its configuration, got {left[0]}"
            f"{f' and {len(left) - 1} others' if left[1:] else ''}, which {type(model).__name__} has no place for: "
            "correct config.json, or pass a function that builds the model as you want it"
        )
    return _check_head(model if whole else text_model_of(model))


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
        return AutoModelForCausalLM  # from_pretrained reports what is missing


def _head_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters of the vocabulary head."""
    head = model.get_output_embeddings()
    own = set() if head is None else set(head.parameters())
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in own}


def _unreadable_file(folder: Path) -> str:
    """Return the path of the first unreadable safetensors file, which errors of transformers do not name."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError:
            return f"{path}: "
    return ""


def check_parts(source: nn.Module, role: Role, policy: PreTrainedModel | None = None) -> PreTrainedModel:
    """Return the transformers model of a source, after the checks of a model of a run that compute no forward of it.

    Every model of a run passes them, and then :func:`check_forward`.

    Args:
        source: Model, or peft model around it.
        role: Its role.
        policy: Policy of the run, for another model.

    Raises:
        ValueError: If a check fails; names the role, and says what to change.
    """
    with name_role(role):
        check_adapters(source, trains=role in TRAINED)
        model = base_model_of(source)
        check_dropout(model)
        check_head(model)
        if role == "policy":
            check_router_loss(model)
        if policy is not None and policy is not model:
            _check_vocabulary(model, policy)
        if policy is not None and role not in TRAINED:
            _check_frozen(model, policy)
    return model


def _check_vocabulary(model: PreTrainedModel, policy: PreTrainedModel) -> None:
    sizes = [one.config.get_text_config().vocab_size for one in (policy, model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"expected a model with the policy's vocabulary of {sizes[0]} tokens, got {sizes[1]} tokens: pass a model "
            "of the same family"
        )


def _check_frozen(model: PreTrainedModel, policy: PreTrainedModel) -> None:
    """Check that a model can be frozen without a parameter that the policy trains."""
    names = {id(parameter): name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    if shared := [names[id(parameter)] for parameter in model.parameters() if id(parameter) in names]:
        raise ValueError(
            f"expected a model apart from the policy, got one that shares {shared[0]} with it, which trains: pass a "
            "function that builds a new model"
        )


def build_policy(
    policy: ModelSource,
    critic: ModelSource | None,
    *,
    temperature: float,
    packed: bool,
    attention: str = AUTO,
    batch_invariant: bool = False,
    checkpointing: Checkpointing | None = None,
    split: bool = False,
    processor: PictureProcessor | None = None,
) -> PolicyModel:
    """Return policy and critic, without dropout and with a forward that agrees with the model's own.

    Args:
        policy: Source of the policy.
        critic: Source of the critic, ``"shared"``, or None.
        temperature: Temperature of the policy.
        packed: True to run microbatches without padding.
        attention: Kernel for packed sequences.
        batch_invariant: True for log-probabilities whose bits do not depend on the batch.
        checkpointing: Mode of activation checkpointing.
        split: True to build the policy on the meta device if it comes from a folder and has no separate critic;
            :meth:`PolicyModel.fill` loads and checks it after sharding.
        processor: Processor of pictures, with which the towers of a multimodal policy are kept, frozen.

    Raises:
        ValueError: If a check fails; names the model, and says what to change.
    """
    source, files = model_and_files(
        policy, "policy", split=split and critic in (None, "shared"), whole=processor is not None
    )
    model = check_parts(source, "policy")
    freeze_towers(model)
    backbone = None if critic is None else model
    if critic not in (None, "shared"):
        with name_role("critic"):
            own = build_model(critic, CRITIC_HINT, head=False)
        backbone = check_parts(own, "critic", model)
    options: dict[str, Any] = {"attention": attention, "batch_invariant": batch_invariant, "files": files}
    options["processor"] = processor
    built = PolicyModel(model, backbone, temperature=temperature, packed=packed, **options)
    roles: dict[PreTrainedModel, Role] = {backbone or model: "critic", model: "policy"}
    for part, role in roles.items() if files is None else ():
        check_forward(part, role, packed=packed, processor=processor)
    for part in roles if checkpointing else ():
        checkpoint_layers(part, checkpointing)
    return built.train()  # transformers checkpoints activations only in train mode; dropout was ruled out


def build_scorer(
    source: nn.Module,
    role: Role,
    policy: PreTrainedModel | None,
    *,
    temperature: float,
    packed: bool,
    attention: str = AUTO,
    batch_invariant: bool = False,
    files: WeightFiles | None = None,
    processor: PictureProcessor | None = None,
) -> FrozenModel:
    """Return a frozen model in eval mode that scores the policy's samples, checked like the policy.

    Args:
        source: Model, or peft model around it.
        role: Its role.
        policy: Policy of the run, if known.
        temperature: Divisor of the logits.
        packed: True to score without padding.
        attention: Kernel for packed sequences.
        batch_invariant: True for log-probabilities whose bits do not depend on the batch.
        files: Files from which :meth:`FrozenModel.shard` loads the model before it checks its numbers.
        processor: Processor of the policy's pictures; None without.

    Raises:
        ValueError: If a check fails; names the model, and says what to change.
    """
    model = check_parts(source, role, policy)
    options: dict[str, Any] = {"attention": attention, "batch_invariant": batch_invariant, "files": files}
    options["processor"] = processor
    scorer = FrozenModel(model, temperature=temperature, packed=packed, role=role, **options)
    if files is None:
        check_forward(model, role, packed=packed, processor=processor)
    return scorer


def model_and_files(
    source: ModelSource, role: Role, *, split: bool = False, whole: bool = False
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Return a new model, or with ``split`` and a folder one on the meta device with the files to load it from."""
    with name_role(role):
        return (model_without_numbers(source, whole=whole) if split else None) or (
            build_model(source, whole=whole),
            None,
        )


def build_tokenizer(tokenizer: TokenizerSource | None, policy: ModelSource) -> PreTrainedTokenizerBase | None:
    """Return the given tokenizer, also by its name, folder or dotted import path, or by default that of the policy.

    By default, a policy folder without tokenizer files has none. That of a processor has the processor with it.
    """
    named: Any = import_by_name(tokenizer=tokenizer)
    if named is not tokenizer:
        given = isinstance(named, PreTrainedTokenizerBase | ProcessorMixin) or not callable(named)
        tokenizer = named if given else cast(Any, named())
    if isinstance(tokenizer, ProcessorMixin):
        return attach(tokenizer)
    argument = "tokenizer" if tokenizer is not None else "policy"
    if tokenizer is None and isinstance(policy, str | Path):
        if Path(policy).is_dir() and not any(file for name in TOKENIZER_FILES for file in Path(policy).glob(name)):
            return None
        tokenizer = policy
    if tokenizer is not None and not isinstance(tokenizer, str | Path | PreTrainedTokenizerBase):
        raise ValueError(
            f"expected tokenizer to be a tokenizer of transformers, or the name or folder of one, got {tokenizer!r}"
        )
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    if missing := missing_folder(tokenizer):
        raise ValueError(f"expected {argument}= to be an existing folder, or a name on the hub, got {missing}")
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
    """Return a description of a missing folder; empty if it exists, or if the source may be a name on the hub.

    A file, such as a checkpoint of a run, is no folder. A name on the hub has at most one slash. A Path, or text that
    begins with a dot, a slash or a tilde, has to be a folder.
    """
    text, path = str(source), Path(source)
    if path.is_file():
        return f"the file {text!r}: pass the folder of a model, or load a run by RLLightningModule.load_from_checkpoint"
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
    """Return the ids that end a response: ``eos_token_ids``, or those of generation config and tokenizer.

    Raises:
        ValueError: If there are neither ids nor stop strings, so that no response could end.
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
    """Return the maximum length of a prompt that leaves room for a response; None without a context limit.

    Raises:
        ValueError: If there is no room for any prompt.
    """
    context = context_window(model.config)
    if context is not None and context <= max_new_tokens:
        why = ", beyond which its RoPE would depend on the longest row of a batch" * depends_on_batch(model.config)
        raise ValueError(f"expected max_new_tokens below the context window of {context}{why}, got {max_new_tokens}")
    return None if context is None else context - max_new_tokens


def _own_code(source: str | Path, error: ValueError) -> str:
    """Return the message for a source that transformers rejects, for example because it requires remote code."""
    cause = str(error).splitlines()[0]
    if "trust_remote_code" not in str(error):
        return f"expected a model or tokenizer that transformers can load, got {str(source)!r}: {cause}"
    return (
        f"expected a model or tokenizer that transformers can load without remote code, got {str(source)!r}: "
        f"{cause} (code in a checkpoint is never run; if you trust it, "
        "pass a function that loads it with trust_remote_code=True)"
    )
