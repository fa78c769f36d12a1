"""Faults of rewards, models, corrections and optimizer steps, each put in from outside."""

from unittest.mock import patch

import torch

import lightning_rl.algorithm
import lightning_rl.policy.packing
import lightning_rl.rollouts.signal
import lightning_rl.update
from faults import faulty_steps as wrong
from faults.fault import Fault
from faults.faulty import Altering, after, changed_rows
from faults.stages import KL, PPO, STEPS
from lightning_rl import ClippedSurrogate, Rollout, Stat
from lightning_rl.algorithm import Algorithm
from lightning_rl.distributed import Parallel
from lightning_rl.policy import PolicyModel
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.signal.kl import k3

SMALL = {"token_budget": 24}

MORE: tuple[Fault, ...] = (
    Fault(
        "rewards of the row before", "reward_rows", "stage draw",
        patches=[after(Rewards, "__call__", lambda scores, *_: scores._replace(total=scores.total.roll(1)))],
    ),
    Fault("a reward of the place in the list", "reward_order", "reward by_row", options={"rewards": wrong.by_row}),
    Fault(
        "the last token of a response masked", "sampled_is_trained", "stage draw",
        patches=[changed_rows(wrong.without_last_token)],
    ),
    Fault(
        "groups of the row before", "sample_conservation", "stage draw",
        patches=[changed_rows(lambda rollout: rollout.replace(groups=rollout.groups.roll(1)))],
    ),
    Fault(
        "a group lost after the draw", "sample_conservation", "stage draw",
        patches=[after(Sampler, "draw", wrong.without_first_group)],
    ),
    Fault(
        "temperature applied twice", "logprob_alignment", "before the update", options=STEPS,
        patches=[patch.object(PolicyModel, "forward", wrong.twice_the_temperature)],
    ),
    Fault(
        "packed sequences see each other", "logprob_alignment|packing|weight_sync|canary", "",
        patches=[patch.object(lightning_rl.policy.packing, "_runs", wrong.one_sequence)],
    ),
    Fault(
        "a cache that holds another prompt", "weight_sync", "engine Altering",
        options={"engine": lambda: Altering(request=wrong.another_prefix)},
    ),
    Fault("a reference that follows the policy", "reference_stays", "the reference",
          callbacks=lambda: [KL(), wrong.MovingReference()]),
    Fault(
        "values divided by the temperature", "values_ignore_temperature", "the value head", options=PPO,
        patches=[patch.object(PolicyModel, "_values", wrong.divided_values)],
    ),
    Fault(
        "a KL loss of the wrong sign", "distances_pull_back", "reference_kl.loss_term",
        callbacks=lambda: [wrong.Repelling(0.1, as_loss=True)], options=STEPS,
    ),
    Fault(
        "a KL reward of the wrong sign", "distances_pull_back", "reference_kl.token_reward",
        callbacks=lambda: [wrong.Rewarding(0.1)], options=PPO,
    ),
    Fault("a loss of the wrong sign", "loss_direction", "loss wrong_way", options={"loss": wrong.wrong_way, **STEPS}),
    Fault(
        "a knob of the loss without effect", "knob_liveness", "loss ClippedSurrogate",
        options={"loss": ClippedSurrogate(dual_clip=1.5), **STEPS},
        patches=[patch.object(ClippedSurrogate, "__call__", wrong.deaf_to_dual_clip)],
    ),
    Fault(
        "a knob of a correction without effect", "knob_liveness", "callback overlong_penalty",
        callbacks=lambda: [wrong.DeafPenalty(8, 4, coef=0.3)],
    ),
    Fault("weights that are drawn", "contributions_fit", "random.token_weight", callbacks=lambda: [wrong.Random()]),
    Fault(
        "a mean over padding", "padding_width", "estimator OverPadding", options={"advantages": wrong.OverPadding()}
    ),
    Fault(
        "advantages of the first token alone", "advantage_support", "estimator FirstTokenAlone",
        options={"advantages": wrong.FirstTokenAlone()},
    ),
    Fault(
        "masked values not cleaned", "loss_masked_values", "", callbacks=lambda: [KL()], options=STEPS,
        patches=[
            patch.object(Rollout, "sanitize", lambda self: self),
            patch.object(lightning_rl.algorithm, "masked_fill_invalid", lambda values, mask: values * mask),
        ],
    ),
    Fault(
        "the entropy bonus left out", "terms_add_up", "objective", options={"entropy_coef": 0.1},
        patches=[after(Algorithm, "__call__", wrong.without_entropy_bonus)],
    ),
    Fault(
        "a mean over microbatches", "step_gradient", "accumulation", options=SMALL,
        patches=[wrong.accumulating(wrong.mean_over_microbatches)],
    ),
    Fault(
        "the last microbatch alone", "parameter_gradient", "accumulation", options=SMALL,
        patches=[wrong.accumulating(wrong.last_microbatch_alone)],
    ),
    Fault(
        "each microbatch clipped", "parameter_gradient", "clipping", options=SMALL,
        patches=[wrong.accumulating(wrong.clipping_each_microbatch)],
    ),
    Fault(
        "clipping without effect", "parameter_gradient", "clipping", options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", wrong.unclipped)],
    ),
    Fault(
        "the gradient norm logged after clipping", "parameter_gradient", "clipping", options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", lambda norm, *_: norm.clamp(max=0.01))],
    ),
    Fault("an optimizer without half of the parameters", "optimizer_moves", "optimizer, parameter",
          options={"optimizer": wrong.without_some}),
    Fault("a scheduler that steps twice", "optimizer_moves", "scheduler", options={"lr_scheduler": wrong.Doubled}),
    Fault(
        "the old policy taken from the current one", "step_gradient", "stage update", options=STEPS,
        patches=[after(lightning_rl.update, "view_of", wrong.ever_on_policy)],
    ),
    Fault("another rollout in the middle of a cycle", "raw_fields", "swapping.on_train_batch_start",
          callbacks=lambda: [wrong.Swapping()], options=STEPS),
    Fault(
        "length logged as the padded width", "logged_metrics", "metric length/mean",
        patches=[
            after(
                lightning_rl.rollouts.signal, "reward_metrics",
                wrong.logging("length/mean", lambda rollout: Stat.of(torch.full((len(rollout),), rollout.width))),
            )
        ],
    ),
    Fault(
        "entropy logged over masked tokens", "logged_metrics", "metric policy/entropy",
        patches=[
            after(
                lightning_rl.algorithm, "policy_metrics",
                wrong.logging("policy/entropy", lambda view: Stat.of(view.entropy)),
            )
        ],
    ),
    Fault(
        "the KL to the engine the wrong way round", "raw_kl", "metric kl/rollout", options=STEPS,
        patches=[
            after(
                lightning_rl.algorithm, "policy_metrics",
                wrong.logging(
                    "kl/rollout",
                    lambda view: Stat.of(k3(view.logprobs, view.required("rollout_logprobs")), view.valid_tokens),
                ),
            )
        ],
    ),
)  # fmt: skip
