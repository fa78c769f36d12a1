"""Runs on real servers: the engine, the module, and what has to hold of every rollout."""

from functools import partial
from typing import Any

from torch.optim import AdamW

from kit.served import SECRET, Served
from kit.support import tiny_module
from kit.vllm_models import EOS, a_model
from kit.vllm_rank import Watch
from lightning_rl import RLLightningModule, VLLMServerEngine

MODEL = partial(a_model, "qwen2-tied", architectures=["Qwen2ForCausalLM"])


def an_engine(*servers: Served, **options: Any) -> VLLMServerEngine:
    """A client that waits for servers to start."""
    known: dict[str, Any] = {"api_key": SECRET, "patience": 300, "timeout": 120, **options}
    return VLLMServerEngine([server.url for server in servers], **known)


def a_run(*servers: Served, **options: Any) -> RLLightningModule:
    """A module that trains on what servers draw."""
    known: dict[str, Any] = {
        "policy": MODEL,
        "tokenizer": None,
        "minibatches_per_rollout": 2,
        "temperature": 0.8,
        "max_new_tokens": 12,
        "engine": an_engine(*servers),
        "optimizer": partial(AdamW, lr=1e-3),
        "eos_token_ids": [EOS, *range(20, 30)],
    }
    return tiny_module(**{**known, **options})


def check_run(watch: Watch, rollouts: int) -> None:
    """Every sample once, by the weights of its rollout, and engine and trainer agree on every token."""
    assert [rollout.sample_ids.tolist() for rollout in watch.rollouts] == [
        list(range(number * 16, number * 16 + 16)) for number in range(rollouts)
    ]
    for number, rollout in enumerate(watch.rollouts):
        assert (rollout.policy_version[rollout.action_mask] == number).all()
        assert rollout.rollout_logprobs is not None and rollout.old_logprobs is not None
        difference = (rollout.rollout_logprobs - rollout.old_logprobs)[rollout.valid_tokens]
        assert float(difference.abs().max()) < 1e-4
