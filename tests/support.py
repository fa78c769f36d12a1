"""What tests share: tiny policies, ragged rollouts, views from plain lists, one optimizer step, a short fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import AdamW
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightning_rl import (
    ClippedSurrogate,
    Contributions,
    Finish,
    LossView,
    Objective,
    PolicyLoss,
    PromptDataModule,
    RLCallback,
    RLLightningModule,
    Rollout,
    sequence_mean,
)
from lightning_rl.signal.masked import own_sum
from lightning_rl.signal.reductions import Reduction

VOCABULARY, EOS = 16, 1


def tiny_policy(seed: int = 0, *, dtype: torch.dtype = torch.float32, **options: Any) -> Qwen2ForCausalLM:
    """A two-layer Qwen2 with weights large enough that its log-probabilities are far from uniform."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 4}
    config = Qwen2Config(
        **{
            "vocab_size": VOCABULARY,
            **shape,
            "num_key_value_heads": 2,
            "initializer_range": 0.2,
            "max_position_embeddings": 64,
            "eos_token_id": EOS,
            "bos_token_id": None,
            **options,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, dtype)
    return model


def ragged_rollout(
    rows: int = 12, *, group_size: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32, longest: int = 7
) -> Rollout:
    """Random samples with every optional field: holes in the action mask, an empty row, truncated rows, NaN outside."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (rows,), generator=draw)
    lengths[rows // 2] = 0
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
        finish=torch.where(lengths == longest, Finish.LENGTH, Finish.STOP).to(torch.uint8),
        policy_version=torch.where(inside, 0, -1),
        trained=whole,
        rewarded=whole,
        rewards=rewards,
        task_rewards={"task": rewards},
        **{name: cast(Any, torch.where(actions, values, torch.nan)) for name, values in per_token.items()},
    )


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
        tensor = torch.as_tensor(values)
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
        "finish": torch.as_tensor(given.get("finish", [Finish.STOP] * number), dtype=torch.uint8),
        "policy_version": torch.zeros(number, width, dtype=torch.int64),
        "trained": torch.ones(number, dtype=torch.bool),
        "rewarded": torch.ones(number, dtype=torch.bool),
        "rewards": torch.as_tensor(given.get("rewards", [0.0] * number), dtype=dtype),
        "old_logprobs": current.detach(),
        "advantages": torch.ones(number, width, dtype=dtype),
        "entropy": torch.zeros(number, width, dtype=dtype),
    }
    return LossView(**{**base, **per_token}, logprobs=current)


@dataclass
class Step:
    """What one evaluation of the objective gave."""

    loss: Tensor
    gradient: Tensor  # with respect to the log-probabilities, [b, T]
    metrics: dict[str, float]


def run_step(
    view: LossView,
    *,
    callbacks: Sequence[RLCallback] = (),
    loss: PolicyLoss | None = None,
    reduction: Reduction = sequence_mean,
    **options: Any,
) -> Step:
    """The real objective on one view: loss, gradient with respect to ``view.logprobs``, every metric."""
    objective = Objective(
        loss=loss or ClippedSurrogate(), reduction=reduction, contributions=Contributions(callbacks), **options
    )
    found = objective(view, lambda weigh: weigh(view.valid_tokens, view.trained, view.groups, own_sum))
    (gradient,) = torch.autograd.grad(found.total, view.logprobs)
    metrics = {name: float(part) for name, part in found.parts.items()}
    metrics |= {name: float(stat.value()) for name, stat in found.stats.items()}
    return Step(found.total.detach(), gradient, metrics)


def view_of_rollout(rollout: Rollout, logprobs: Tensor) -> LossView:
    """A view of all rows of a rollout under given current log-probabilities."""
    known = {spec.name: getattr(rollout, spec.name) for spec in fields(rollout)}
    return LossView(**known, logprobs=logprobs, entropy=torch.zeros_like(logprobs))


def parity_reward(prompts: Sequence[Any], completions: Sequence[str], *, completion_ids: Any, **_: Any) -> list[float]:
    """1 for a response of odd length, else 0: a reward with spread for random policies."""
    return [float(len(ids) % 2) for ids in completion_ids]


def tiny_module(**options: Any) -> RLLightningModule:
    """A module around :func:`tiny_policy`; every option can be replaced."""
    defaults: dict[str, Any] = {
        "policy": tiny_policy,
        "rewards": parity_reward,
        "group_size": 4,
        "max_new_tokens": 8,
        "optimizer": partial(AdamW, lr=1e-2, weight_decay=0.0),
    }
    return RLLightningModule(**{**defaults, **options})


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
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "log_every_n_steps": 1,
    }
    trainer = Trainer(**{**quiet, **options}, callbacks=list(callbacks))
    trainer.fit(module, data or tiny_prompts(), ckpt_path=ckpt_path)
    return trainer


def weights_of(module: RLLightningModule) -> dict[str, Tensor]:
    """Every trained parameter, copied."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


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
