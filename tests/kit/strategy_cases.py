"""Runs whose result may not depend on the strategy or the number of ranks, and what is kept of them.

Run as a script it is one rank: ``strategy_cases.py FOLDER RANKS STRATEGY CASE,...`` saves the result of each case.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Trainer
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from kit.chats import CHAT, CLOSE, chat_prompts
from kit.conversations import CONVERSATIONS, TURN_ENDS, Forgetful
from kit.harnesses import Client, user
from kit.ranks import STRATEGIES
from kit.support import FAMILIES, cast_exactly, fit, tiny_model, tiny_module, tiny_policy, tiny_prompts
from kit.vision import PROCESSORS, picture_rows, vision_model
from lightning_rl import FakeEngine, PromptDataModule, RLCallback, Rollout, SamplingParams
from lightning_rl.callbacks import (
    OPSM,
    NoEOSMask,
    ReferenceKL,
    RolloutKL,
    RouterAuxLoss,
    RouterReplay,
    rollout_kl,
)
from lightning_rl.corrections import StepTrace
from lightning_rl.distributed import process_objects
from lightning_rl.environments import Program
from lightning_rl.environments.program import PolicyEndpoint
from lightning_rl.generation import Request
from lightning_rl.metrics import is_of_the_clock

Result = dict[str, Any]
Sample = tuple[tuple[int, ...], tuple[bool, ...], int, float]
"""Token ids of a response, its action mask, finish reason and reward."""


class Watch(RLCallback):
    """Keeps logged figures that do not measure time, every sample, and the weights at the end, over all ranks."""

    name = "watch"

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}
        self.samples: dict[int, Sample] = {}

    @override
    def observe(self, rollout: Rollout) -> None:
        for row, sample in enumerate(rollout.sample_ids.tolist()):
            said = slice(int(rollout.response_lengths[row]))
            ids, actions = rollout.response_ids[row][said].tolist(), rollout.action_mask[row][said].tolist()
            self.samples[sample] = tuple(ids), tuple(actions), int(rollout.finish[row]), float(rollout.rewards[row])

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *arguments: Any, **keywords: Any) -> None:
        values = pl_module.run.metrics.values()
        self.rows.append({key: value for key, value in values.items() if not is_of_the_clock(key)})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        weights = pl_module.parallel.full_parameters(pl_module.policy)
        self.weights = {name: weight.double().cpu().clone() for name, weight in weights}
        for samples in process_objects(self.samples):
            self.samples |= samples


def lora_policy(dtype: torch.dtype, **options: Any) -> nn.Module:
    """The tiny policy with adapters that are not zero."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(tiny_policy(dtype=dtype, **options), LoraConfig(r=2, target_modules=targets))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def uneven(request: Request) -> Sequence[int]:
    """Responses of very different lengths, so that ranks need different numbers of microbatches."""
    length = request.sampling.max_new_tokens if request.sample_id % 8 == 3 else 1 + request.sample_id % 3
    return [2 + (request.sample_id + place) % 12 for place in range(length - 1)] + [1]


def truncated_on_one_rank(request: Request) -> Sequence[int]:
    """Every sample of odd prompts is truncated: under NoEOSMask("drop_tokens") whole ranks have nothing to train."""
    if (request.sample_id // 4) % 2:
        return [5] * request.sampling.max_new_tokens
    return uneven(request)


def rewriting(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """A program that asks in three contexts, of which one continues the first answer."""
    ask, messages = Client(model), list(row["prompt"])
    first = ask(messages)
    answers = [first, ask([*messages, first, user("red")]), ask([user("say green ?")])]
    return 0.25 * len({word for answer in answers for word in answer["content"].split()})


class Divided(RLCallback):
    """Checks that sequences of a row lay in different microbatches."""

    name, found = "divided", False

    @override
    def observe_step(self, trace: StepTrace) -> None:
        self.found |= any(not isinstance(entry, int) for microbatch in trace.microbatches for entry in microbatch.rows)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        assert self.found


OPTIONS: dict[str, dict[str, Any]] = {
    "critic": {"advantages": "gae", "critic": "shared"},
    "one microbatch": {"max_tokens_per_microbatch": 10_000},
    "checkpointing": {"activation_checkpointing": "selective"},
    "compiled": {"activation_checkpointing": "full", "compile": "aot_eager"},
    "conversations": {**CONVERSATIONS, "sampling": SamplingParams(max_new_tokens=9, eos_token_ids=TURN_ENDS)},
    "contexts": {
        **CONVERSATIONS,
        "environment": Forgetful,
        "sampling": SamplingParams(max_new_tokens=9, eos_token_ids=TURN_ENDS),
    },
    "programs": {
        **{name: CHAT[name] for name in ("tokenizer", "rewards", "max_turn_tokens")},
        "environment": Program(rewriting),
        "sampling": SamplingParams(max_new_tokens=10, eos_token_ids=CLOSE),
    },
}

DRIFTED_BEYOND = 1.1e-3
"""Threshold of ``rollout_kl/drifted`` at which no token lies; a token of "conversations" is 1.7e-7 from the default."""


def run(case: str, dtype: torch.dtype, **trainer: Any) -> Result:
    """Train for two rollouts, four optimizer steps; ``trainer`` selects strategy and devices."""
    torch.set_num_threads(1)
    watch = Watch()
    corrections: list[RLCallback] = [OPSM(1e-3), RolloutKL(0.1), ReferenceKL(0.1, as_loss=True)]
    options: dict[str, Any] = {"policy": partial(tiny_policy, dtype=dtype), **OPTIONS.get(case, {})}
    if case == "lora":
        options |= {"policy": partial(lora_policy, dtype)}
    masks: list[RLCallback] = [] if case == "programs" else [NoEOSMask()]  # rows are divided without it and OPSM
    if case == "own critic":
        options |= {"advantages": "gae", "critic": partial(tiny_policy, 1, dtype=dtype)}
    if case == "uneven":
        options |= {"engine": FakeEngine(uneven)}
    if case == "masked":
        options |= {"engine": FakeEngine(truncated_on_one_rank)}
        masks = [NoEOSMask("drop_tokens")]
    if case in FAMILIES:
        options |= {"policy": partial(tiny_model, case, dtype=dtype)}
    data = tiny_prompts(16, 8)
    if case == "programs":
        options |= {"policy": partial(CHAT["policy"], dtype=dtype)}
        corrections, data = [*corrections[1:], Divided()], chat_prompts(16, 8)
    if case == "pictures":
        policy = lambda: cast_exactly(vision_model("qwen2_5_vl"), dtype)  # noqa: E731
        options |= {"policy": policy, "tokenizer": PROCESSORS["qwen2_5_vl"](), "max_tokens_per_microbatch": 60}
        data = PromptDataModule(picture_rows(16), 8)
    if case == "replayed":
        options |= {"policy": partial(tiny_model, "qwen3_moe", dtype=dtype), "top_p": 0.9}
        corrections += [RouterReplay(), RouterAuxLoss(0.1)]
    settings = {"optimizer": partial(SGD, lr=0.05), "minibatches_per_rollout": 2, "max_tokens_per_microbatch": 20}
    module = tiny_module(**{**settings, **options})
    with patch.object(rollout_kl, "DRIFTED_BEYOND", DRIFTED_BEYOND):
        fit(module, callbacks=[*masks, *corrections, watch], data=data, **trainer)
    return {"rows": watch.rows, "weights": watch.weights, "samples": watch.samples}


CASES: tuple[str, ...] = (
    "plain", "critic", "own critic", "lora", "uneven", "masked", "one microbatch", "checkpointing", "conversations",
    "contexts", "pictures", "programs",
)  # fmt: skip
EXACT = {"ddp", "fsdp2", "tensor"}  # FSDP1 casts every model to float32, DeepSpeed has no float64


def dtype_of(strategy: str) -> torch.dtype:
    """Return the dtype of the comparison for a strategy."""
    return torch.float64 if strategy in EXACT else torch.float32


def main(folder: Path, ranks: int, strategy: str, cases: Sequence[str]) -> None:
    """One rank of several runs in one process group."""
    for case in cases:
        make: Callable[[], Any] = STRATEGIES[strategy]
        result = run(case, dtype_of(strategy), devices=ranks, strategy=make())
        if torch.distributed.get_rank() == 0:
            torch.save(result, folder / f"{strategy} {case}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(","))
