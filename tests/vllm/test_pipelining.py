"""vLLM that generates ahead of the trainer, in a thread of this process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import callback_of, fit, recorder, tiny_module, tiny_prompts, weights_of
from kit.vllm_models import a_model
from kit.vllm_rank import an_engine
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import AdamW

from lightning_rl import RLLightningModule, Rollout
from lightning_rl.callbacks import TruncatedIS

TEMPERATURE = 0.8


def ahead(**options: Any) -> RLLightningModule:
    """Return a module whose rollouts vLLM generates one ahead."""
    known: dict[str, Any] = {
        "policy": a_model,
        "engine": an_engine(),
        "minibatches_per_rollout": 2,
        "temperature": TEMPERATURE,
        "max_new_tokens": 12,
        "optimizer": partial(AdamW, lr=1e-3),
        "eos_token_ids": [1, *range(20, 30)],
    }
    return tiny_module(max_staleness=1, **{**known, **options})


def logprobs_under(weights: dict[str, Tensor], rollout: Rollout) -> Tensor:
    """Return the log-probabilities of the sampled tokens under these weights, [B, T]."""
    policy, found = a_model(), torch.zeros(rollout.response_ids.shape)
    policy.load_state_dict(
        {name.removeprefix("policy.model."): weight for name, weight in weights.items()}, strict=False
    )
    for row, length in enumerate(rollout.response_lengths.tolist()):
        prompt, response = rollout.prompt_ids[row, : rollout.prompt_lengths[row]], rollout.response_ids[row, :length]
        with torch.no_grad():
            logits = policy(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        found[row, :length] = (logits / TEMPERATURE).log_softmax(-1).gather(1, response[:, None])[:, 0]
    return found


def test_samples_have_the_log_probabilities_of_the_weights_that_their_version_names() -> None:
    module = ahead()
    rollouts, weights = list[Rollout](), list[dict[str, Tensor]]()
    taking = callback_of("taking", observe=lambda _: weights.append(weights_of(module)))
    fit(module, callbacks=[TruncatedIS(), taking, recorder(rollouts)("seen")], data=tiny_prompts(16, 4))
    versions = [rollout.policy_version[rollout.action_mask].unique().tolist() for rollout in rollouts]
    assert versions == [[0], [0], [1], [2]]
    for cycle, rollout in enumerate(rollouts[1:], 1):
        valid, drawn = rollout.valid_tokens, rollout.require("rollout_logprobs")
        gaps = [(logprobs_under(weights[number], rollout) - drawn)[valid].abs() for number in (cycle - 1, cycle)]
        assert float(gaps[0].max()) < 1e-4 < float(gaps[1].max())


@pytest.mark.parametrize("step", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_pipelined_run_resumes_exactly(step: int, tmp_path: Path) -> None:
    def run(folder: Path, **options: Any) -> dict[str, Tensor]:
        module = ahead()
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options = {"enable_checkpointing": True, "max_epochs": 2, **options}
        fit(module, callbacks=[TruncatedIS(), saving], data=tiny_prompts(8, 4, validation=[[2, 3]]), **options)
        return weights_of(module)

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", ckpt_path=tmp_path / "whole" / f"step={step}.ckpt")
    assert [name for name, weight in whole.items() if not torch.equal(resumed[name], weight)] == []
