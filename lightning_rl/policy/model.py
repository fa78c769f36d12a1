"""Transformers causal language model that returns log-probabilities of action tokens, with a critic."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_rl.corrections import OUTPUTS, Outputs
from lightning_rl.policy.attention import AUTO
from lightning_rl.policy.batch_invariance import BatchInvariance, is_batch_invariant, make_batch_invariant
from lightning_rl.policy.context_window import check_window
from lightning_rl.policy.embedding_gradients import embedding_leaves, token_gradients
from lightning_rl.policy.extreme_draws import ExtremeDraws, other_generators
from lightning_rl.policy.load_balancing import record_routers
from lightning_rl.policy.logprobs import head_logits, sum_of_squares, token_logprobs, token_logprobs_and_kl
from lightning_rl.policy.media import media_arguments, own_arguments, placeholders_of, plain_placeholders
from lightning_rl.policy.module_values import (
    Event,
    ModuleDifference,
    ModuleValues,
    TokenPosition,
    first_difference,
    positions_of,
    record_modules,
    rounding_of,
)
from lightning_rl.policy.packing import PACKED_ATTENTION, Layout, PackingError, pack, packed_attention
from lightning_rl.policy.probe_weights import probe_weights
from lightning_rl.policy.processor import PictureProcessor
from lightning_rl.policy.roles import TRAINED, Role, name_role
from lightning_rl.policy.tensor_hash import fingerprint
from lightning_rl.policy.text_model import backbone_of, modules_behind
from lightning_rl.policy.weight_files import WeightFiles
from lightning_rl.rollout import Rollout, join_tokens
from lightning_rl.samples import PROMPT, Completion, FinishReason, Request, SamplingParams, Trajectory

PADDED = "use packing=False"
LOGIT_OPTIONS = (  # of a model's configuration: factors, a divisor, caps; MPT has a factor of None
    *("logit_scale", "lm_head_multiplier", "output_multiplier"),
    *("logits_scaling", "final_logit_softcapping", "logits_soft_cap"),
)
MULTIPLY = ("hyperclovax",)  # types of models that multiply by logits_scaling, by which Granite divides


class FiniteOutputs:
    """Check that the policy's outputs are finite; on an accelerator it synchronizes only in :meth:`check`.

    Args:
        device: Device of the policy. On the CPU every microbatch is checked at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._at_once = device.type == "cpu"
        self._waiting = list[tuple[str, Tensor, Tensor, Tensor]]()  # output, values, sample ids, True if not finite

    def note(self, outputs: Outputs, rows: Rollout) -> None:
        """Add the valid tokens of a microbatch, without synchronizing an accelerator.

        Raises:
            FloatingPointError: On the CPU, as :meth:`check`.
        """
        for what, tensor in (("log-probability", outputs.logprobs), ("value", outputs.values)):
            if tensor is not None:
                values = tensor.detach()
                if self._at_once and math.isfinite(float(values.sum())):  # one pass; a finite sum has finite terms
                    continue
                self._waiting.append((what, values, rows.sample_ids, (~torch.isfinite(values)).any()))
        if self._at_once:
            self.check()

    def check(self) -> None:
        """Check everything added so far.

        Raises:
            FloatingPointError: If a value is not finite; names sample and position of the first one.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting or not bool(torch.stack([broken for *_, broken in waiting]).any()):
            return
        what, values, sample_ids, _ = next(one for one in waiting if one[-1])
        row, position = (~torch.isfinite(values)).nonzero()[0].tolist()
        raise FloatingPointError(
            f"expected finite outputs of the policy, got {what} {float(values[row, position])} at row {row} (sample "
            f"{int(sample_ids[row])}), response position {position}: its weights or hidden states are broken"
        )


class PolicyModel(nn.Module):
    """Policy and critic in one module, so that they share one optimizer and one gradient norm.

    Args:
        model: Policy, a causal language model with a plain linear head.
        critic: Model whose hidden states the value head reads: ``model`` itself or another one; None for no critic.
        temperature: Divisor of the policy's logits, as in generation; values are not divided.
        packed: True to run microbatches without padding.
        attention: Kernel for packed sequences.
        batch_invariant: True for log-probabilities whose bits do not depend on the batch.
        files: Files from which :meth:`fill` loads the policy; None if it is loaded already.
        role: Role of ``model``.
        processor: Processor of the pictures that :meth:`fill` checks; None for a model of text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        critic: PreTrainedModel | None,
        *,
        temperature: float,
        packed: bool,
        attention: str = AUTO,
        batch_invariant: bool = False,
        files: WeightFiles | None = None,
        role: Role = "policy",
        processor: PictureProcessor | None = None,
    ) -> None:
        super().__init__()
        self.packed, self.attention, self.files, self.role = packed, attention, files, role
        self.processor = processor
        self.model = model
        self.critic = None if critic is None or critic is model else backbone_of(critic)
        self.value_head: nn.Linear | None = None
        if critic is not None:
            width = head_of(critic).weight.shape[1]
            self.value_head = nn.Linear(width, 1, bias=False, dtype=critic.dtype, device=critic.device)
            nn.init.zeros_(self.value_head.weight)
        self.temperature = temperature
        roles: dict[PreTrainedModel, Role] = {critic or model: "critic", model: role}
        self._configs = {name: part.config for part, name in roles.items()}
        for part, name in roles.items() if packed else ():
            with name_role(name):
                use_packed_attention(part)
        if batch_invariant:
            make_batch_invariant(model)

    def forward(self, layout: Layout, *, squares: bool = False) -> Outputs:
        """Score the valid tokens of a microbatch, with the sums of squared probabilities if ``squares``.

        Raises:
            ValueError: If a row is longer than the context window of policy or critic.
        """
        self.check_windows(layout.longest)
        recorder = nullcontext() if layout.expert_load is None else record_routers(self.model)
        with recorder as routers:
            states = _hidden_states(backbone_of(self.model), layout, self.attention, whole=self.model)
        with BatchInvariance() if is_batch_invariant(self.model) else nullcontext():
            logprobs, entropy, *kl = _score(self.model, states, layout, self.temperature)
        outputs = Outputs(layout.scatter(logprobs), layout.scatter(entropy), self._values(states, layout))
        outputs = outputs._replace(rollout_kl=layout.scatter(kl[0])) if kl else outputs
        outputs = outputs if routers is None else outputs._replace(router_loss=routers.loss(layout))
        if not squares:
            return outputs
        return outputs._replace(sum_pi_squared=layout.scatter(self._squares(states, layout)))

    @override
    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Keep the dtype of buffers when weights are cast.

        Rotary frequencies are buffers. Rounded to bfloat16 they are off by a radian after 1000 tokens.
        """
        buffers = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, exact in buffers.items():
            cast_buffer = self.get_buffer(name)
            if cast_buffer.dtype != exact.dtype:
                holder, _, key = name.rpartition(".")
                setattr(self.get_submodule(holder), key, exact.to(cast_buffer.device))
        return self

    def fill(self, device: torch.device) -> None:
        """Load this rank's part of a policy built on the meta device, and check it. Every rank has to call it.

        Raises:
            ValueError: As :func:`check_forward`.
        """
        if self.files is not None:
            self.files.fill(self, device)
            check_forward(self.model, self.role, packed=self.packed, split=self, processor=self.processor)

    def check_windows(self, tokens: int) -> None:
        """Check that rows of some number of tokens are within the context windows of policy and critic.

        Raises:
            ValueError: If they are not; names the model.
        """
        for role, config in self._configs.items():
            check_window(config, tokens, role)

    def layers(self) -> list[nn.Module]:
        """Return the transformer blocks of policy and critic, which a sharding strategy gathers one at a time.

        Those of towers are gathered with the rest, since only ranks with pictures in a microbatch run them.
        """
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        return [
            part for model in self.models() for part in backbone_of(model).modules() if type(part).__name__ in names
        ]

    def models(self) -> list[PreTrainedModel]:
        """Return the models of policy and critic, one or two."""
        return [self.model] if self.critic is None else [self.model, cast(PreTrainedModel, self.critic)]

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the policy."""
        return self.model.config.get_text_config().vocab_size

    def head_sizes(self) -> set[int]:
        """Return the sizes of attention heads, as far as the layers have them as attributes."""
        attentions = (part for model in self.models() for part in modules_behind(model, "attentions").values())
        return {size for part in attentions if isinstance(size := vars(part).get("head_dim"), int)}

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the heads, which the forward reads without calling their layers."""
        heads = (self.model.get_output_embeddings(), self.value_head)
        return [parameter for head in heads if head is not None for parameter in head.parameters()]

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return trainable parameters as optimizer groups, ``policy`` and, with a critic, ``critic``."""
        policy = {"name": "policy", "params": [p for p in self.model.parameters() if p.requires_grad]}
        others = [part for part in (self.critic, self.value_head) if part is not None]
        critic = {"name": "critic", "params": [p for part in others for p in part.parameters() if p.requires_grad]}
        return [policy, critic] if others else [policy]

    def _squares(self, states: Tensor, layout: Layout) -> Tensor:
        head, options = head_of(self.model), _logit_options(self.model, self.temperature)
        return sum_of_squares(
            states[layout.source], head.weight, head.bias, sampling_mask=layout.sampling_mask, **options
        )

    def _values(self, states: Tensor, layout: Layout) -> Tensor | None:
        if self.value_head is None:
            return None
        states = states if self.critic is None else _hidden_states(self.critic, layout, self.attention)
        weight = self.value_head.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            flat = torch.mv(states[layout.source].to(exact), weight[0].to(exact))
        return layout.scatter(flat)


class FrozenModel:
    """Frozen reference or teacher, held outside of the module tree, so that it is neither trained nor saved."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        packed: bool,
        attention: str = AUTO,
        batch_invariant: bool = False,
        files: WeightFiles | None = None,
        role: Role = "reference",
        processor: PictureProcessor | None = None,
    ) -> None:
        self.model, self.files, self.role = model.requires_grad_(requires_grad=False), files, role
        options: dict[str, Any] = {"attention": attention, "batch_invariant": batch_invariant, "files": files}
        options |= {"role": role, "processor": processor}
        self.scoring: nn.Module = PolicyModel(model, None, temperature=temperature, packed=packed, **options).eval()

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all weights, computed once because they are frozen."""
        return fingerprint(self.model.named_parameters() if self.files is None else self.files.parameters())

    def shard(self, split: Callable[[nn.Module, list[nn.Module]], nn.Module], device: torch.device) -> None:
        """Shard the weights over the ranks, or load each rank's part of them, after computing their hash."""
        _ = self.fingerprint
        self.scoring = split(self.scoring, cast(PolicyModel, self.scoring).layers())
        if self.files is not None:
            cast(PolicyModel, self.scoring).fill(device)

    def to(self, device: torch.device) -> None:
        """Move the weights."""
        nn.Module.to(self.scoring, device)

    def check_windows(self, tokens: int) -> None:
        """Check that rows of some number of tokens are within the context window, as :meth:`PolicyModel.check_windows`.

        Raises:
            ValueError: If they are not.
        """
        check_window(self.model.config, tokens, self.role)

    def read_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the log-probabilities depend on."""
        return self.model.parameters()

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which :attr:`model` computes as the reference."""
        return nullcontext()

    @torch.no_grad()
    def logprobs(self, layout: Layout) -> Float[Tensor, "b T"]:
        """Return the log-probabilities of the valid tokens, without gradient.

        Raises:
            RuntimeError: If a parameter that the policy shares with the reference trains by now.
        """
        if moving := {id(parameter) for parameter in self.read_parameters() if parameter.requires_grad}:
            name = next(name for name, parameter in self.model.named_parameters() if id(parameter) in moving)
            raise RuntimeError(
                f"expected the weights of the reference to stay frozen, got {name}, which trains by now: pass "
                "reference= a function that builds the initial policy"
            )
        with self.reading():
            absent: dict[str, Any] = {name: None for spec in OUTPUTS for name in spec.inputs}
            return self.scoring(replace(layout, **absent)).logprobs


class Head(NamedTuple):
    """Weight and bias of a vocabulary head with its adapters, which are read without calling it."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None


def head_of(model: PreTrainedModel) -> Head:
    """Return weight and bias of the vocabulary head of a model that :func:`check_head` accepts."""
    layer: Any = head_layer(model)
    return Head(layer.weight, None if "token_adapter" in layer._modules else layer.bias)  # noqa: SLF001


def head_layer(model: PreTrainedModel) -> nn.Module:
    """Return the module that computes the logits: the vocabulary head, or the copy of it that peft trains."""
    head: Any = model.get_output_embeddings()
    copies = head._modules.get("modules_to_save")  # noqa: SLF001
    if copies is None:
        return head
    trained = [copies[name] for name in head.active_adapters if name in copies and not head._disable_adapters]  # noqa: SLF001
    return trained[0] if trained else head.original_module


def check_head(model: PreTrainedModel) -> None:
    """Check that the vocabulary head is a linear layer: its weight is read, and its forward does not run.

    Raises:
        ValueError: If it is another module, or has an adapter other than ``trainable_token_indices``.
    """
    layer: Any = head_layer(model)
    tokens = layer._modules.get("token_adapter")  # noqa: SLF001
    inner = layer if tokens is None else tokens.base_layer
    plain = type(inner).forward is nn.Linear.forward and "forward" not in vars(inner)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any(getattr(part, name) for part in {model.get_output_embeddings(), layer, inner} for name in hooks)
    if plain and not hooked and (tokens is None or inner.bias is None):
        return
    name = next(name for name, part in model.named_modules() if part is layer)
    adapted = tokens is not None or hasattr(layer, "_disable_adapters")
    got = f"{type(layer).__module__}.{type(layer).__name__}" + (" with hooks" if hooked else "")
    cure = f'leave it out of the adapter, or train it whole by modules_to_save=["{name}"]'
    raise ValueError(
        f"expected the vocabulary head {name} to be a linear layer, since its weight alone is read, got {got}: "
        f"{cure if adapted else 'build the model with a torch.nn.Linear'}"
    )


def _hidden_states(
    backbone: nn.Module, layout: Layout, attention: str = AUTO, *, whole: PreTrainedModel | None = None
) -> Tensor:
    """Return the last hidden states of all inputs; only inputs with pictures run the towers of the ``whole`` model."""
    config, media = getattr(backbone, "config", None), layout.media
    implementation = getattr(config, "_attn_implementation", None)  # no public name
    with packed_attention(layout, implementation=implementation, attention=attention) as arguments:
        if media is None or whole is None:
            positions = {"position_ids": layout.position_ids} if layout.lengths else {}
            output = backbone(input_ids=layout.input_ids, use_cache=False, **positions, **arguments)
        else:
            model: Any = whole.base_model
            arguments |= media_arguments(model, media, layout.position_ids)
            with plain_placeholders(model, layout.input_ids, media.drawn.flatten()[media.place]) as ids:
                output = model(input_ids=ids, use_cache=False, **arguments)
    return output.last_hidden_state.flatten(0, 1)


def _score(model: PreTrainedModel, states: Tensor, layout: Layout, temperature: float) -> tuple[Tensor, ...]:
    """Return log-probabilities, entropies and, where the engine's likeliest tokens are known, its KL."""
    head = head_of(model)
    inputs = states[layout.source], head.weight, head.bias, layout.targets
    options: dict[str, Any] = {"sampling_mask": layout.sampling_mask, **_logit_options(model, temperature)}
    if layout.top_ids is None or layout.top_logprobs is None:
        return token_logprobs(*inputs, batch_invariant=is_batch_invariant(model), **options)
    return token_logprobs_and_kl(*inputs, top_ids=layout.top_ids, top_logprobs=layout.top_logprobs, **options)


def unscaled_logits(model: PreTrainedModel, hidden: Float[Tensor, "A H"]) -> Float[Tensor, "A V"]:
    """Return the logits that training divides by :func:`logit_divisor`, for last hidden states."""
    head = head_of(model)
    return head_logits(hidden, head.weight, head.bias, soft_cap=_logit_options(model, 1.0)["soft_cap"])


def logit_divisor(model: PreTrainedModel, temperature: float) -> float:
    """Return the temperature, divided by the scale that the model applies to its logits."""
    return _logit_options(model, temperature)["temperature"]


def _logit_options(model: PreTrainedModel, temperature: float) -> dict[str, Any]:
    """Return the scale that the model applies to its logits, merged into the temperature, and its soft cap.

    Cohere, Granite, HyperCLOVAX, Falcon-H1 and Muse scale logits; Gemma, Muse and others cap them by a tanh.
    """
    config = model.config.get_text_config()
    options = vars(config)
    known = {name: value for name in LOGIT_OPTIONS if isinstance(value := options.get(name), int | float)}
    factors = [known.get(name, 1) for name in LOGIT_OPTIONS[:3]]
    divisor = known.get("logits_scaling", 1)
    scale = math.prod(factors) * (divisor if config.model_type in MULTIPLY else 1 / divisor)
    cap = known.get("final_logit_softcapping", known.get("logits_soft_cap"))
    soft_cap = None if cap is None else cap / scale  # models with both scale before they cap
    return {"temperature": temperature / scale, "soft_cap": soft_cap}


def carries_state(model: PreTrainedModel) -> bool:
    """Return True if a layer passes a state from token to token, as linear attention, Mamba and convolutions do.

    An attention mask does not stop such a state at padding or at the ends of packed sequences.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return model._is_stateful or any("attention" not in kind or "linear" in kind for kind in kinds)  # noqa: SLF001


def use_packed_attention(model: PreTrainedModel) -> None:
    """Set the attention implementation that reads the boundaries of packed sequences.

    Raises:
        ValueError: If a layer would read across them.
    """
    if carries_state(model):
        raise ValueError(f"packed sequences would read the states of {type(model).__name__}: {PADDED}")
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise ValueError(f"packed attention does not support the chunked attention of {type(model).__name__}: {PADDED}")
    text = model.config.get_text_config()
    names = [name for name in model.config.sub_configs if getattr(model.config, name, None) is text]
    chosen = {"": PACKED_ATTENTION, **dict.fromkeys(names, PACKED_ATTENTION)} if names else PACKED_ATTENTION
    model.set_attn_implementation(chosen)  # not of towers; only warns where it does nothing
    if getattr(backbone_of(model).config, "_attn_implementation", None) != PACKED_ATTENTION:  # no public name
        raise ValueError(
            f"expected attention through the AttentionInterface of transformers, got {type(model).__name__}, whose own "
            f"attention cannot be packed: {PADDED}"
        )


def check_forward(
    model: PreTrainedModel,
    role: Role,
    *,
    packed: bool,
    split: PolicyModel | None = None,
    processor: PictureProcessor | None = None,
) -> None:
    """Check the numbers of a model of a run under :func:`probe_weights`, with the arguments of :func:`check_scoring`.

    Raises:
        ValueError: As :func:`check_scoring` and, for a model that trains, :func:`check_modes`; names the role.
    """
    with name_role(role), probe_weights(split or model, cast=split is None and not needs_half(model)):
        check_scoring(model, packed=packed, split=split)
        if processor is not None:
            check_scoring(model, packed=packed, split=split, rows=picture_rows(model, processor))
        if role in TRAINED:
            check_modes(model, packed=packed, split=split)
        if split is not None:
            cast(Any, split).reshard()  # parameters outside of the layers


def needs_half(model: PreTrainedModel) -> bool:
    """Return True if the attention computes in half precision alone."""
    return "flash" in (getattr(model.config.get_text_config(), "_attn_implementation", None) or "")  # no public name


@torch.no_grad()
def check_scoring(
    model: PreTrainedModel, *, packed: bool, split: PolicyModel | None = None, rows: Rollout | None = None
) -> None:
    """Compare our log-probabilities of a few random tokens with those of the model's own forward.

    Detects everything beyond a linear head and plain attention, such as unknown logit scales, and layers that read
    other packed sequences.

    Args:
        model: Policy.
        packed: True to run without padding.
        split: Sharded module that contains the policy; every rank has to call this then.
        rows: Rows with pictures; None for random text.

    Raises:
        ValueError: If they differ by more than rounding, or are NaN; says what to change.
    """
    pictures = rows is not None
    rows = Rollout.of_samples(*random_rows(model), groups=(0, 0, 1, 2)) if rows is None else rows
    layout = pack(rows, packed=packed).to(model.device)
    training = (split or model).training
    (split or model).eval()  # see check_modes
    temperature = 1.0 if split is None else split.temperature
    with _refusing_errors(model, packed=packed, split=split, rows=rows if pictures else None):
        scores = layout.scatter(_logprobs(model, layout, split))
        if split is not None:
            cast(Any, split).unshard()  # parameters outside of the layers, for the model's own forward
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.2
    for row in range(len(rows)):
        one = rows.select(torch.tensor([row]))
        prompt, length = int(one.prompt_lengths), int(one.response_lengths)
        alone = join_tokens(one, one.prompt_ids, one.response_ids).to(model.device)
        with _refusing_errors(model, packed=False, rows=rows if pictures else None):
            own = {name: value.to(model.device) for name, value in own_arguments(model.base_model, one).items()}
            logits = model(input_ids=alone[None], use_cache=False, **own).logits[0, prompt - 1 : -1]
            others = {name: -value if value.is_floating_point() else value for name, value in own.items()}
            if own and torch.equal(logits, model(input_ids=alone[None], **others).logits[0, prompt - 1 : -1]):
                raise ValueError("other pictures change no log-probability")
        if logits.shape[-1] != len(head_of(model).weight):
            raise ValueError(
                f"expected {type(model).__name__} to score the {len(head_of(model).weight)} tokens of its vocabulary "
                f"head, got {logits.shape[-1]} without its padding: train another model"
            )
        expected = (logits.float() / temperature).log_softmax(-1).gather(1, alone[prompt:, None])[:, 0]
        if bool(expected.isnan().any()):
            raise ValueError(
                f"expected {type(model).__name__} to give numbers as log-probabilities, got NaN: look for NaN and "
                "infinity in its weights"
            )
        worst = float((scores[row, :length].float() - expected).abs().max())
        if not worst < tolerance:
            if packed:
                check_scoring(
                    model, packed=False, split=split, rows=rows if pictures else None
                )  # refuses the model if padding does not help
            advice = PADDED if packed else "its head is not a plain linear layer, or its attention is not causal"
            raise ValueError(
                f"expected {type(model).__name__} to give the same log-probabilities "
                f"{'packed' if packed else 'padded'} as alone{' with pictures' * pictures}, but they differ by "
                f"{worst:.2g}: {advice}"
            )
    if packed and not pictures and _reads_neighbors(model, split):
        raise ValueError(f"packed sequences would read each other in {type(model).__name__}: {PADDED}")
    if split is not None:
        cast(Any, split).reshard()
    (split or model).train(training)


def picture_rows(model: PreTrainedModel, processor: PictureProcessor) -> Rollout:
    """Return rows with prompts of one picture, shared by two, of two pictures, and of none, and random responses."""
    draw, special = torch.Generator().manual_seed(0), placeholders_of(model.config)
    red, wide = (torch.randint(256, (56, width, 3), generator=draw, dtype=torch.uint8) for width in (56, 84))
    prompts = [processor.prompt(pictures) for pictures in ([red], [red], [wide, red], [])]
    tokens = torch.tensor([token for token in range(len(head_of(model).weight)) if token not in special])
    responses = tokens[torch.randint(len(tokens), (len(prompts), 5), generator=draw)].tolist()
    sampling = SamplingParams(eos_token_ids=())
    opened = (
        Trajectory(prompt=prompt, request=Request.of(prompt, sample_id=number, seed=0, sampling=sampling))
        for number, prompt in enumerate(prompts)
    )
    answers = (
        Completion(token_ids=tuple(ids), logprobs=None, finish=FinishReason.STOP, version=0) for ids in responses
    )
    return Rollout.of([each.extend(PROMPT, (), answer) for each, answer in zip(opened, answers, strict=True)])


def random_rows(model: PreTrainedModel) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and responses of random tokens; the first two prompts are equal."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(head_of(model).weight), (2, 3, 6), generator=generator).tolist()
    prompts = [row[:length] for row, length in zip([ids[0][0], *ids[0]], (4, 4, 1, 6), strict=True)]
    return prompts, [row[:length] for row, length in zip([*ids[1], ids[0][1]], (3, 6, 2, 4), strict=True)]


def _layout(
    prompts: list[list[int]], responses: list[list[int]], *, groups: Sequence[int], packed: bool, device: torch.device
) -> Layout:
    return pack(Rollout.of_samples(prompts, responses, groups=groups), packed=packed).to(device)


def _logprobs(model: PreTrainedModel, layout: Layout, split: PolicyModel | None) -> Tensor:
    """Return the log-probabilities [A] of a layout's valid tokens."""
    if split is not None:
        return split(layout).logprobs[layout.rows, layout.columns]
    return _score(model, _hidden_states(backbone_of(model), layout, whole=model), layout, 1.0)[0]


def _reads_neighbors(model: PreTrainedModel, split: PolicyModel | None) -> bool:
    """Return True if a log-probability depends on the tokens of another packed sequence."""
    layout = _layout(*random_rows(model), groups=(0, 1, 2, 3), packed=True, device=model.device)
    with embedding_leaves(model) as leaves:
        logprobs = _logprobs(model, layout, split)
        sequence = torch.repeat_interleave(torch.tensor([keys for _, keys in layout.lengths])).to(model.device)
        return any(
            bool(token_gradients(logprobs[layout.rows == row], leaves)[0, sequence != row].any())
            for row in range(len(layout.lengths))
        )


@torch.no_grad()
def check_modes(model: PreTrainedModel, *, packed: bool, split: PolicyModel | None = None) -> None:
    """Compare the forward in train mode, in which a policy trains, with that in eval mode, in which engines sample.

    Detects noise beyond dropout, such as the jitter of a router or layers that are skipped now and then, under which
    the importance ratio of an unchanged policy would not be 1. Arguments as for :func:`check_scoring`.

    Raises:
        ValueError: If they differ by more than rounding, or with the random numbers that a module draws; names the
            first module that does.
    """
    prompts, responses = random_rows(model)
    layout = _layout(prompts * 8, responses * 8, groups=range(32), packed=packed, device=model.device)
    scored, gpu, outside = split or model, model.device.type != "cpu", other_generators()
    training, positions = scored.training, positions_of(layout)
    lengths = [len(prompt + response) - 1 for prompt, response in zip(prompts, responses, strict=True)] * 8
    rounding = gpu * rounding_of([parameter.dtype for parameter in model.parameters()])  # CPUs repeat every bit

    def run(*, trains: bool, highest: bool, record: bool = False) -> tuple[Tensor, ModuleValues, bool]:
        torch.manual_seed(int(highest))
        scored.train(trains)
        recorder = record_modules(model, backbone_of(model), lambda _: positions) if record else nullcontext()
        with recorder as values, ExtremeDraws(highest=highest) as draws:
            return _logprobs(model, layout, split)[:, None].float(), values or ModuleValues(), draws.drawn

    def differing(*, trains: bool, highest: bool) -> ModuleDifference | None:
        (expected, evaluated, _), (found, other, _) = (
            run(trains=mode, highest=end, record=True) for mode, end in ((False, False), (trains, highest))
        )
        head = Event("", "output"), [TokenPosition(row, 0) for row in layout.rows.tolist()], expected, found
        return first_difference(evaluated, other, lengths, head=head, rounding=rounding)

    with torch.random.fork_rng([model.device] if gpu else [], device_type=model.device.type if gpu else "cuda"):
        expected, _, drawn = run(trains=False, highest=False)
        for trains, highest in ((True, False), (True, True), (False, True)):
            if highest and not drawn:
                break
            found, _, draws = run(trains=trains, highest=highest)
            drawn |= draws
            difference = None if torch.equal(expected, found) else differing(trains=trains, highest=highest)
            if difference is not None and not difference.rounded:
                same = "in train mode as in eval mode" if trains else "with any random numbers"
                raise ValueError(
                    f"expected {type(model).__name__} to compute the same {same}, but "
                    f"{difference.module or 'its head'} differs by {difference.relative:.2g}: switch off its noise"
                )
    scored.train(training)
    if other_generators() != outside:
        raise ValueError(
            f"expected the forward of {type(model).__name__} to draw no random numbers, but it draws some of Python or "
            "NumPy: switch off its noise"
        )


@contextmanager
def _refusing_errors(
    model: PreTrainedModel, *, packed: bool, split: PolicyModel | None = None, rows: Rollout | None = None
) -> Iterator[None]:
    """Turn an error of the model's code into a ValueError."""
    try:
        yield
    except (PackingError, torch.OutOfMemoryError):
        raise
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if packed:
            check_scoring(model, packed=False, split=split, rows=rows)  # refuses the model if padding does not help
        what = "text alone" if rows is None else "text and pictures"
        cure = PADDED if packed else "train another model, as this one needs more than text"
        if rows is not None and not packed:
            cure = (
                "pass the processor of its files as tokenizer=, or that of a policy that reads pictures; for a "
                "policy of text, a tokenizer"
            )
        raise ValueError(
            f"expected {type(model).__name__} to read {'packed' if packed else 'padded'} tokens of {what}, got "
            f"{type(error).__name__}: {error}: {cure}"
        ) from error


def check_dropout(model: PreTrainedModel) -> None:
    """Check that a model has no dropout, under which the importance ratio of an unchanged policy would not be 1.

    Raises:
        ValueError: If it has; names the config attribute, or the module of an adapter.
    """
    for name, part in model.named_modules():
        if "lora_dropout" in name and getattr(part, "p", 0) > 0:
            raise ValueError(f"expected a model without dropout, got {name}: set lora_dropout=0")
    for name, value in {**model.config.to_dict(), **model.config.get_text_config().to_dict()}.items():
        active = isinstance(value, float | int) and not isinstance(value, bool) and value > 0
        drops = any(word in name for word in ("dropout", "pdrop", "layerdrop"))
        if active and drops and not name.startswith(("classifier", "summary")):
            raise ValueError(f"expected a model without dropout, got config.{name}={value}: set it to 0")


def check_router_loss(model: PreTrainedModel) -> None:
    """Check that a policy's configuration asks for no auxiliary loss, which only its own forward with labels would add.

    Raises:
        ValueError: If it does.
    """
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"expected the training signal to come from losses of the library, got {type(model).__name__} with "
            "config.output_router_logits=True, whose auxiliary loss would train nothing: set it to False, and add "
            "RouterAuxLoss(coef) to the callbacks to balance the experts"
        )
