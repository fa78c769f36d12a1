"""Shared code of tests: tiny policies, ragged rollouts, views from plain lists, one optimizer step, a short fit."""

import atexit
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.optim import AdamW
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from typing_extensions import override

from kit import lockstep
from lightning_rl import (
    ClippedSurrogate,
    Conversations,
    Critic,
    FaultTolerance,
    FinishReason,
    LossView,
    ModelOptions,
    PolicyLoss,
    PromptDataModule,
    Rewards,
    RLCallback,
    RLLightningModule,
    Rollout,
    SamplingParams,
    StopOnZeroGradient,
    sequence_mean,
)
from lightning_rl.advantages import Estimator, resolve_advantages
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import EntropyBonus
from lightning_rl.corrections import Corrections, Stat
from lightning_rl.data import Prompt
from lightning_rl.distributed import Collectives
from lightning_rl.losses import ValueLoss
from lightning_rl.policy.build import ModelBuilder
from lightning_rl.rollouts.collector import Collector
from lightning_rl.signal.masked import GlobalSum, local_sum
from lightning_rl.signal.reductions import Reduction
from lightning_rl.signal.selection import local_values

VOCABULARY, EOS = 16, 1
ModelT = TypeVar("ModelT", bound=PreTrainedModel)


class ExactNorm(Qwen2RMSNorm):
    """Without the float32 to which norms round gradients, those of one row or of several that share a prompt."""

    @override
    def forward(self, hidden_states: Tensor) -> Tensor:
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(mean + self.variance_epsilon)


def keep_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep float64 in layers that go through float32, whose rounding would set the bar."""
    to: Callable[..., Tensor] = Tensor.to

    def to_double(self: Tensor, *given: object, **named: object) -> Tensor:
        return to(self, *(torch.float64 if one is torch.float32 else one for one in given), **named)

    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(Tensor, "to", to_double)


def cast_exactly(model: ModelT, dtype: torch.dtype) -> ModelT:
    """A model in a precision; in float64 its norms are too."""
    torch.nn.Module.to(model, dtype)
    for part in model.modules() if dtype == torch.float64 else ():
        if hasattr(part, "variance_epsilon"):
            part.__class__ = ExactNorm
    return model


def tiny_policy(seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen2ForCausalLM:
    """A two-layer Qwen2 with weights large enough that its log-probabilities are far from uniform."""
    shape: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    shape |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    shape |= {"max_position_embeddings": 64, "eos_token_id": EOS, "bos_token_id": None}
    config = Qwen2Config(**shape | options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    return cast_exactly(model, dtype)


class TinyPolicy(ModelBuilder):
    """:func:`tiny_policy` as an object of a class, for configuration files."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @override
    def __call__(self) -> Qwen2ForCausalLM:
        """Builds it."""
        return tiny_policy(self.seed)


DELTA_NET = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED: dict[str, Any] = {  # the last two layers attend to keys and values of the first two
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "per_layer_config": {},
    "pad_token_id": 0,
}
MAMBA2 = {"mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "experts_implementation": "eager",
    },
    "gemma2": {"head_dim": 8},
    "nanochat": {},
    "cohere": {},
    "granite": {},
    "hyperclovax": {},
    "gemma4_text": SHARED,
    "mistral": {},
    "exaone4": {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "experts_implementation": "eager",
    },
    "qwen3_next": {
        **DELTA_NET,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, **MAMBA2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, **MAMBA2},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 32,
        **MAMBA2,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "n_groups": 1, "chunk_size": 8, "num_heads": 4, "head_dim": 16},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": 16, "lru_width": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "experts_implementation": "eager"},
}


def tiny_model(family: str, seed: int = 0, *, dtype: torch.dtype = torch.float64, **options: Any) -> PreTrainedModel:
    """A two-layer model of one of :data:`FAMILIES`, with weights large enough that it is far from uniform."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    shape |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
    shape |= {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.3}
    config = AutoConfig.for_model(family, **{**shape, **FAMILIES.get(family, {}), **options})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return cast_exactly(model, dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One word for each id: ``</s>`` is EOS, the others are ``a``, ``b``, ... from id 2 on."""
    words = ["<unk>", "</s>", *"abcdefghijklmn"]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def ragged_rollout(
    rows: int = 12, *, group_size: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32, longest: int = 7
) -> Rollout:
    """Random samples with every optional field: holes in the action mask, an empty row, truncated rows, NaN outside."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=draw)
    lengths[0], lengths[rows // 2] = longest, 0
    prompts = torch.randint(1, 5, (rows,), generator=draw)
    inside = torch.arange(longest) < lengths[:, None]
    actions = inside & (torch.rand(rows, longest, generator=draw) > 0.15)
    whole = torch.ones(rows, dtype=torch.bool)

    def noise(scale: float) -> Tensor:
        return torch.randn(rows, longest, generator=draw, dtype=dtype) * scale

    rollout_logprobs = -noise(1.0).abs() - 0.1
    old_logprobs = rollout_logprobs + noise(0.1)
    per_token: dict[str, Any] = {
        "rollout_logprobs": rollout_logprobs,
        "old_logprobs": old_logprobs,
        "ref_logprobs": old_logprobs + noise(0.3),
        "values": noise(0.5),
        "advantages": noise(1.0),
        "returns": noise(1.0),
    }
    rewards = torch.randint(0, 3, (rows,), generator=draw).to(dtype)
    return Rollout(
        prompt_ids=torch.randint(2, VOCABULARY, (rows, 4), generator=draw),
        prompt_lengths=prompts,
        response_ids=torch.randint(2, VOCABULARY, (rows, longest), generator=draw),
        response_lengths=lengths,
        action_mask=actions,
        valid_tokens=actions,
        groups=torch.arange(rows) // group_size,
        sample_ids=torch.arange(rows),
        finish=torch.where(lengths == longest, FinishReason.LENGTH, FinishReason.STOP).to(torch.uint8),
        policy_version=torch.where(inside, 0, -1),
        trained=whole,
        rewarded=whole,
        rewards=rewards,
        rewards_by_function={"task": rewards},
        **{name: cast(Any, torch.where(actions, values, torch.nan)) for name, values in per_token.items()},
    )


def rollout_of(
    rewards: list[float], tokens: list[list[int]], *, groups: list[int] | None = None, **given: Any
) -> Rollout:
    """A rollout from plain lists; ``tokens`` is the action mask."""
    rows, width = len(tokens), len(tokens[0])
    actions = torch.tensor(tokens, dtype=torch.bool).reshape(rows, width)
    whole = torch.ones(rows, dtype=torch.bool)
    base: dict[str, Any] = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.int64),
        "prompt_lengths": torch.ones(rows, dtype=torch.int64),
        "response_ids": torch.zeros(rows, width, dtype=torch.int64),
        "response_lengths": actions.sum(-1),
        "action_mask": actions,
        "valid_tokens": actions,
        "groups": torch.tensor([0] * rows if groups is None else groups),
        "sample_ids": torch.arange(rows) + 100,
        "finish": torch.zeros(rows, dtype=torch.uint8),
        "policy_version": torch.zeros(rows, width, dtype=torch.int64),
        "trained": whole,
        "rewarded": whole,
        "rewards": torch.tensor(rewards),
        "values": torch.zeros(rows, width),
    }
    return Rollout(**base | {name: torch.as_tensor(value) for name, value in given.items()})


def view_of(
    logprobs: Any,
    *,
    valid: Any = None,
    groups: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> LossView:
    """A LossView from plain lists, one list for one row or a list of rows; ``logprobs`` carries gradient."""

    def rows_of(values: Any) -> Tensor:
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
        return tensor[None] if tensor.dim() == 1 else tensor

    current = rows_of(logprobs).to(dtype).detach().requires_grad_()
    number, width = current.shape
    mask = torch.ones(number, width, dtype=torch.bool) if valid is None else rows_of(valid).bool()
    per_token = {name: rows_of(values).to(dtype) for name, values in given.items() if name not in ("rewards", "finish")}
    base: dict[str, Any] = {
        "prompt_ids": torch.full((number, 1), 2),
        "prompt_lengths": torch.ones(number, dtype=torch.int64),
        "response_ids": torch.full((number, width), 3),
        "response_lengths": mask.sum(-1),
        "action_mask": mask,
        "valid_tokens": mask,
        "groups": torch.arange(number) if groups is None else torch.as_tensor(groups),
        "sample_ids": torch.arange(number),
        "finish": torch.as_tensor(given.get("finish", [FinishReason.STOP] * number), dtype=torch.uint8),
        "policy_version": torch.zeros(number, width, dtype=torch.int64),
        "trained": torch.ones(number, dtype=torch.bool),
        "rewarded": torch.ones(number, dtype=torch.bool),
        "rewards": torch.as_tensor(given.get("rewards", [0.0] * number), dtype=dtype),
        "old_logprobs": current.detach(),
        "advantages": torch.ones(number, width, dtype=dtype),
        "entropy": torch.zeros(number, width, dtype=dtype),
    }
    return LossView(**dict[str, Any](base, **per_token, logprobs=current))


@dataclass
class StepResult:
    """Result of one evaluation of the loss."""

    loss: Tensor
    gradient: Tensor  # with respect to the log-probabilities, [b, T]
    metrics: dict[str, float]


def an_algorithm(
    callbacks: Sequence[RLCallback] = (),
    *,
    loss: PolicyLoss | None = None,
    reduction: Reduction = sequence_mean,
    advantages: Estimator | str = "grpo",
    entropy_coef: float = 0.0,
    value_loss: ValueLoss | None = None,
) -> Algorithm:
    """An algorithm with everything by default; ``entropy_coef`` adds an :class:`EntropyBonus`."""
    bonus = [EntropyBonus(entropy_coef)] if entropy_coef else []
    return Algorithm(
        loss=loss or ClippedSurrogate(),
        reduction=reduction,
        advantages=resolve_advantages(advantages),
        corrections=Corrections([*callbacks, *bonus]),
        value_loss=value_loss or ValueLoss(),
    )


def run_step(
    view: LossView,
    *,
    callbacks: Sequence[RLCallback] = (),
    loss: PolicyLoss | None = None,
    reduction: Reduction = sequence_mean,
    **options: Any,
) -> StepResult:
    """The real algorithm on one view: loss, gradient with respect to ``view.logprobs``, every metric."""
    algorithm = an_algorithm(callbacks, loss=loss, reduction=reduction, **options)
    if algorithm.loss.prepares:
        with torch.no_grad():
            prepared = algorithm.loss.prepare([view.sanitize()], local_sum, local_values)
        view = view.replace(prepared=None if prepared is None else prepared[0])
    found = algorithm.microbatch_loss(
        view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, local_sum)
    )
    (gradient,) = torch.autograd.grad(found.total, view.logprobs)
    metrics = {name: float(part) for name, part in found.parts.items()}
    metrics |= {name: float(stat.value()) for name, stat in found.stats.items()}
    return StepResult(found.total.detach(), gradient, metrics)


class SummedBy(Collectives):
    """Collectives of a rank whose sums are those of a function."""

    def __init__(self, global_sum: GlobalSum) -> None:
        super().__init__()
        self._sum = global_sum

    @override
    def sum(self, values: Tensor) -> Tensor:
        return self._sum(values)


def fill_rollout(
    collector: Collector, take: Callable[[int], list[Prompt]], groups: int, number: int = 0
) -> tuple[Rollout, dict[str, Stat]]:
    """The groups of a rollout on this rank alone, from the first round to the last, and how many there were."""
    first = collector.sample(collector.open(take(groups), number), logprobs=collector.reads_logprobs(number))
    scored = collector.fill_groups(take, groups, number, first=first)
    return scored.rollout, {name: stat for name, stat in scored.stats.items() if name.startswith("groups/")}


def sample_groups(collector: Collector, prompts: Sequence[Prompt], number: int = 0) -> Rollout:
    """One round of a rollout, scored."""
    wanted, logprobs = collector.open(prompts, number), collector.reads_logprobs(number)
    return collector.reward(collector.sample(wanted, logprobs=logprobs))[0]


def view_of_rollout(rollout: Rollout, logprobs: Tensor) -> LossView:
    """A view of all rows of a rollout under given current log-probabilities."""
    known = {spec.name: getattr(rollout, spec.name) for spec in fields(rollout)}
    return LossView(**known, logprobs=logprobs, entropy=torch.zeros_like(logprobs))


def parity_reward(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> list[float]:
    """1 for a response of odd length, else 0: a reward with spread for random policies."""
    return [float(len(ids) % 2) for ids in completion_ids]


CONVERSATIONS = {name: name for name in ("tool_parser", "max_turns", "max_turn_tokens")}
CONVERSATIONS |= {"environment_workers": "workers", "max_environment_failure_rate": "max_failure_rate"}
CONVERSATIONS |= {"environment_timeout": "step_timeout", "conversation_timeout": "timeout"}


def nested_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a module in which those of its groups are passed by their own names."""

    def take(names: Mapping[str, str]) -> dict[str, Any]:
        return {names[name]: options.pop(name) for name in names if name in options}

    options = dict(options)
    if "tools" in options:
        options["environment"] = options.pop("tools")
    if model := take({spec.name: spec.name for spec in fields(ModelOptions)}):
        options["model"] = replace(options.get("model", ModelOptions()), **model)
    for name, kind, names in (
        ("rewards", Rewards, {"reward_timeout": "timeout", "max_reward_failure_rate": "max_failure_rate"}),
        ("critic", Critic, {"value_loss": "loss"}),
        ("environment", Conversations, CONVERSATIONS),
    ):
        if group := take(names):
            options[name] = kind(options[name], **group)
    return options


CALLBACKS: dict[str, tuple[str, ...]] = {
    "FaultTolerance": ("skip_rollouts", "on_checkpoint_error", "allow_config_changes"),
    "StopOnZeroGradient": ("patience",),
}


def tiny_module(**options: Any) -> RLLightningModule:
    """A module around :func:`tiny_policy`; options of SamplingParams and of the groups go by their own names.

    Options of the callbacks that every run has go to :func:`fit`.
    """
    given = {kind: {name: options.pop(name) for name in names if name in options} for kind, names in CALLBACKS.items()}
    names = [spec.name for spec in fields(SamplingParams) if spec.name in options]
    sampling: dict[str, Any] = {"max_new_tokens": 8, **{name: options.pop(name) for name in names}}
    defaults: dict[str, Any] = {
        "policy": tiny_policy,
        "rewards": parity_reward,
        "group_size": 4,
        "sampling": SamplingParams(**sampling),
        "optimizer": partial(AdamW, lr=1e-2, weight_decay=0.0),
    }
    module = RLLightningModule(**nested_options({**defaults, **options}))
    kinds = {"FaultTolerance": FaultTolerance, "StopOnZeroGradient": StopOnZeroGradient}
    vars(module)["callbacks"] = [kinds[kind](**group) for kind, group in given.items() if group]
    return module


def tiny_prompts(number: int = 16, per_rollout: int = 4, **options: Any) -> PromptDataModule:
    """Prompts of one to three token ids."""
    rows = [[2 + place % 13, 3 + place % 7, 4][: 1 + place % 3] for place in range(number)]
    return PromptDataModule(rows, per_rollout, **options)


def fit(
    module: RLLightningModule,
    *,
    callbacks: Sequence[Callback] = (),
    data: PromptDataModule | None = None,
    ckpt_path: str | Path | None = None,
    **options: Any,
) -> Trainer:
    """A short ``Trainer.fit`` on the CPU without bar, logger or checkpoints unless asked for."""
    trainer = a_trainer([*callbacks, *vars(module).get("callbacks", ())], **options)
    trainer.fit(module, data or tiny_prompts(), ckpt_path=ckpt_path)
    return trainer


def a_trainer(callbacks: Sequence[Callback] = (), **options: Any) -> Trainer:
    """Trainer for the CPU without bar, logger or checkpoints unless they are passed."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "default_root_dir": tempfile.mkdtemp(dir=scratch()),
    }
    return Trainer(**{**quiet, **options}, callbacks=list(callbacks))


@cache
def scratch() -> Path:
    """Return the folder below which runs without a folder write, such as checkpoints of runs that fail."""
    folder = tempfile.TemporaryDirectory(prefix="lightning-rl-tests-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def weights_of(module: RLLightningModule) -> dict[str, Tensor]:
    """Every trained parameter, copied."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def differing(one: RLLightningModule, other: RLLightningModule) -> list[str]:
    """Return the names of the weights in which two modules differ by a bit."""
    first, second = weights_of(one), weights_of(other)
    return [name for name in first if not torch.equal(first[name], second[name])]


def recorder(seen: list[Rollout]) -> Callable[[str], RLCallback]:
    """Makes a callback that keeps every finished rollout."""

    class Recorder(RLCallback):
        def observe(self, rollout: Rollout) -> None:
            seen.append(rollout)

    def named(name: str) -> RLCallback:
        callback = Recorder()
        callback.name = name
        return callback

    return named


def callback_of(name: str, **members: Any) -> RLCallback:
    """A callback that contributes what plain functions of the rollout or view return; the others are attributes."""
    bodies = {
        member: (lambda _self, seen, *_, body=body: body(seen)) if callable(body) else body
        for member, body in members.items()
    }
    return type(name.title(), (RLCallback,), {"name": name, **bodies})()


def in_lockstep(*ranks: Callable[[GlobalSum], Tensor]) -> list[Tensor]:
    """Return the results of functions that share a ``global_sum`` as ranks do."""
    return lockstep.in_lockstep(*[lambda total, _, rank=rank: rank(total) for rank in ranks])
