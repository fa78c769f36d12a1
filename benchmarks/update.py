"""The update stage against a bare PyTorch loop over the same microbatches, without corrections and with four.

    python benchmarks/update.py

256 rows of 16 prompt tokens and at most 64 of the response, in microbatches of 2,560 tokens: all of full length, of
geometric lengths, or nine short ones to a full one. The bare loop reads the same layouts and measures nothing. A last
variant has a prompt per row instead of one per group of eight. The model is that of the
quickstart: Qwen2, hidden 128, 4 layers, 0.86 M parameters, float32.
"""

import warnings
from functools import partial
from statistics import median

import torch
from bare import add_gradient, step
from jsonargparse import auto_cli
from measure import Report, take_turns
from torch.optim import AdamW
from transformers import Qwen2ForCausalLM
from workload import PROMPT, SIZES, VOCABULARY, Lengths, lengths_of, qwen2

from lightning_rl import GRPO, ClippedSurrogate, RLCallback, Rollout, token_mean
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import OPSM, NoEOSMask, RolloutKL, TruncatedIS
from lightning_rl.corrections import Corrections
from lightning_rl.metrics import MetricLog
from lightning_rl.policy import Microbatch, PolicyModel, make_plan
from lightning_rl.policy.packing import PACKED_ATTENTION
from lightning_rl.update import accumulate_gradient

ROWS, GROUP, LONGEST, BUDGET = 256, 8, 64, 2560
KINDS: tuple[Lengths, ...] = ("equal", "geometric", "90/10")
PLAIN, CORRECTED, APART = "update stage", "update stage, four corrections", "update stage, prompts apart"
Microbatches = tuple[Microbatch, ...]


def model_1m() -> Qwen2ForCausalLM:
    """Return the quickstart's architecture with random weights."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(qwen2(SIZES["1M"]))


def random_rollout(kind: Lengths, rows: int, prompt: int = PROMPT) -> Rollout:
    """Rows with everything that the corrections read."""
    draw = torch.Generator().manual_seed(0)
    lengths = lengths_of(kind, rows, LONGEST)
    prompts = torch.randint(2, VOCABULARY, (rows // GROUP, prompt), generator=draw).repeat_interleave(GROUP, 0).tolist()
    responses = [torch.randint(2, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    rollout = Rollout.of_samples(prompts, responses, groups=[row // GROUP for row in range(rows)])
    logprobs = -2.77 + 0.1 * torch.randn(rollout.response_ids.shape, generator=draw)
    advantages = torch.randn(rows, 1, generator=draw).expand_as(logprobs).contiguous()
    return rollout.replace(rollout_logprobs=logprobs, old_logprobs=logprobs, advantages=advantages)


def bare_update(model: Qwen2ForCausalLM, optimizer: AdamW, rollout: Rollout, microbatches: Microbatches) -> int:
    """Make a step of the bare loop; return the number of tokens."""
    worked = add_gradient(model, rollout, microbatches)
    step(model, optimizer)
    return worked


def stage_update(
    policy: PolicyModel, optimizer: AdamW, rollout: Rollout, microbatches: Microbatches, callbacks: list[RLCallback]
) -> int:
    """Run the library's update stage with every metric; return the number of tokens."""
    algorithm = Algorithm(
        loss=ClippedSurrogate(), advantages=GRPO(), reduction=token_mean, corrections=Corrections(callbacks)
    )
    gradient = accumulate_gradient(
        rollout,
        microbatches,
        lambda microbatch: policy(microbatch.layout),
        algorithm,
        backward=lambda loss: loss.backward(),
    )
    log = MetricLog()
    for stats in gradient.stats:
        log.add("microbatch", stats)
    step(policy, optimizer)
    return int(gradient.joint("policy/entropy")[0])


def main(*, rounds: int = 7, threads: int = 1, quick: bool = False, prompt: int = PROMPT) -> None:
    """Compare the three at each distribution of lengths."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    report = Report("update")
    bare = model_1m()
    bare.set_attn_implementation(PACKED_ATTENTION)
    policy = PolicyModel(model_1m(), None, temperature=1.0, packed=True)
    optimizers = [AdamW(part.parameters(), lr=1e-5, weight_decay=0.0, fused=True) for part in (bare, policy)]
    four: list[RLCallback] = [NoEOSMask(), OPSM(), RolloutKL(), TruncatedIS()]
    for kind in KINDS:
        rollout = random_rollout(kind, ROWS // 8 if quick else ROWS, prompt)
        single = rollout.replace(groups=torch.arange(len(rollout)))  # one group per row
        apart = make_plan(single, minibatches=1, max_tokens_per_microbatch=BUDGET).step(0)
        microbatches = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=BUDGET).step(0)
        variants = {
            "bare loop": partial(bare_update, bare, optimizers[0], rollout, microbatches),
            PLAIN: partial(stage_update, policy, optimizers[1], rollout, microbatches, []),
            CORRECTED: partial(stage_update, policy, optimizers[1], rollout, microbatches, four),
            APART: partial(stage_update, policy, optimizers[1], rollout, apart, []),
        }
        seconds = take_turns(variants, rounds, tokens=int(rollout.valid_tokens.sum()))
        report.table(f"{kind} lengths, {len(microbatches)} microbatches", seconds, base="bare loop")
        stage = median(seconds[PLAIN].of_all(seconds["bare loop"]).cpu)
        report.bound(f"{kind}: update stage, of the bare loop", stage, at_most=1.03)
        corrected = median(seconds[CORRECTED].of_all(seconds[PLAIN]).cpu)
        report.bound(f"{kind}: four corrections, of none", corrected, at_most=1.02)
    report.finish()


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
