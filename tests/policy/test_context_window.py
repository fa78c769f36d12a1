"""LongRoPE and dynamic RoPE: rows within the original context window are as alone, longer ones are refused."""

from functools import partial
from typing import Any

import pytest
import torch
from kit.support import FAMILIES, tiny_model, tiny_module
from lightning.pytorch import Trainer
from transformers import PreTrainedModel

from lightning_rl import PromptDataModule
from lightning_rl.policy import PolicyModel, pack
from lightning_rl.policy.context_window import context_window, depends_on_batch
from lightning_rl.rollout import Rollout

WINDOW = 16
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {**LONG, "original_max_position_embeddings": WINDOW},
        "max_position_embeddings": 4 * WINDOW,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        "max_position_embeddings": WINDOW,
    },
}
every_rope = pytest.mark.parametrize("rope", ROPES)


def model_with(rope: str) -> PreTrainedModel:
    return tiny_model("llama", **ROPES[rope])


def row(length: int, seed: int) -> tuple[list[int], list[int]]:
    ids = torch.randint(2, 11, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids[:2], ids[2:]


def logprobs(policy: PolicyModel, *lengths: int, packed: bool) -> torch.Tensor:
    """Return the log-probabilities of the first row."""
    prompts, responses = zip(*(row(length, length) for length in lengths), strict=True)
    rollout = Rollout.of_samples(prompts, responses, groups=range(len(lengths)))
    return policy(pack(rollout, packed=packed)).logprobs[0, : lengths[0] - 2]


@every_rope
@pytest.mark.parametrize("packed", [True, False])
def test_a_row_in_the_window_is_as_alone_and_a_longer_one_is_refused(rope: str, *, packed: bool) -> None:
    policy = PolicyModel(model_with(rope), None, temperature=1.0, packed=packed)
    alone = logprobs(policy, 6, packed=packed)
    torch.testing.assert_close(logprobs(policy, 6, WINDOW + 1, packed=packed), alone)
    for lengths in ((6, WINDOW + 2), (WINDOW + 8, 6), (WINDOW + 8,)):
        with pytest.raises(ValueError, match=rf"window of {WINDOW} tokens, .* depends on the longest row"):
            logprobs(policy, *lengths, packed=packed)
    torch.testing.assert_close(logprobs(policy, 6, packed=packed), alone, rtol=0, atol=0)


@every_rope
def test_a_run_with_longer_rows_is_refused_at_setup(rope: str) -> None:
    module = tiny_module(policy=partial(model_with, rope), max_new_tokens=WINDOW)
    trainer = Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=rf"context window of {WINDOW}, beyond which its RoPE would depend"):
        trainer.fit(module, PromptDataModule([{"prompt": [2, 3]}], prompts_per_rollout=1))


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 2.0}])
def test_other_ropes_have_the_whole_window(rope: dict[str, Any]) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 1e4, **rope, "original_max_position_embeddings": 8})
    assert context_window(model.config) == 64 and not depends_on_batch(model.config)


def test_a_rope_of_one_type_of_layers_counts() -> None:
    config = tiny_model("gemma3_text", **FAMILIES["gemma3_text"]).config
    config.rope_parameters["full_attention"] = {**LONG, "original_max_position_embeddings": WINDOW}
    assert context_window(config) == WINDOW and depends_on_batch(config)
