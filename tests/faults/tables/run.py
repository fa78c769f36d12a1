"""Faults along a run from sampling to logging, with the check that must name the culprit."""

from functools import partial
from unittest.mock import patch

import torch

import lightning_rl.algorithm
import lightning_rl.policy.attention
import lightning_rl.rollout
import lightning_rl.rollouts.estimate_signal
import lightning_rl.run.training
import lightning_rl.testing.properties.case
import lightning_rl.update
from faults import parts, patches
from faults.fault import PPO, SMALL, STEPS, Fault, correction, engine, rows, user
from faults.patches import after
from lightning_rl import ClippedSurrogate, Rollout, Stat
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, ReferenceKL
from lightning_rl.corrections import Corrections
from lightning_rl.distributed import Parallel
from lightning_rl.policy import FrozenModel, PolicyModel
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts.collector import Collector
from lightning_rl.signal.kl import k3
from lightning_rl.update import StepWeights

KL = partial(ReferenceKL, 0.1, as_loss=True)

FAULTS: tuple[Fault, ...] = (
    rows("token ids of another row", patches.rolled_ids, check="trained_tokens"),
    rows("finish reason from the padded width", patches.finish_by_width, check="trained_tokens"),
    Fault(
        "rollout log-probabilities in bfloat16",
        "stage generate",
        check="trained_tokens",
        patches=[after(lightning_rl.rollout, "_logprobs_of", patches.in_bfloat16)],
    ),
    engine("version read after the response", lambda: parts.Altering(completion=parts.a_version_late), check="answers"),
    rows("a sample counted twice", lambda r: r.replace(sample_ids=r.sample_ids // 2 * 2), check="sample_conservation"),
    rows(
        "groups of a fixed size by position",
        lambda r: r.replace(groups=torch.arange(len(r)) // 3),
        check="sample_conservation",
    ),
    engine("the sampled EOS dropped", lambda: parts.Altering(completion=parts.without_eos), check="answers"),
    engine(
        "every response called truncated", lambda: parts.Altering(completion=parts.mark_as_truncated), check="answers"
    ),
    user(
        "excluded rows train",
        partial(NoEOSMask, "drop_tokens"),
        culprit="trained",
        check="masks",
        patches=[patch.object(lightning_rl.run.training, "exclude_rows", patches.exclude_nobody)],
    ),
    user(
        "reward mask ignored",
        NoEOSMask,
        culprit="rewarded",
        check="masks",
        patches=[after(Corrections, "reward_mask", lambda mask, *_: torch.ones_like(mask))],
    ),
    Fault(
        "old log-probabilities at temperature 1",
        "before the update",
        check="logprob_alignment",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.old_forgets_temperature)],
    ),
    Fault(
        "every forward at temperature 1",
        "the policy",
        check="logprob_alignment",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.all_forget_temperature)],
    ),
    Fault(
        "update at temperature 1, without an old pass",
        "stage update",
        check="logprob_alignment",
        patches=[patch.object(PolicyModel, "forward", patches.all_forget_temperature)],
    ),
    Fault(
        "old log-probabilities one position late",
        "before the update",
        check="logprob_alignment",
        options=STEPS,
        patches=[after(lightning_rl.run.training, "add_logprobs", patches.one_late)],
    ),
    Fault(
        "noise in the old pass",
        "stage score",
        check="first_forward",
        options=STEPS,
        patches=[after(lightning_rl.run.training, "add_logprobs", patches.noisy)],
    ),
    user(
        "reference at temperature 1",
        KL,
        culprit="the reference",
        check="logprob_alignment",
        patches=[after(FrozenModel, "__init__", lambda _, scorer, *__: setattr(scorer.scoring, "temperature", 1.0))],
    ),
    engine(
        "engine that never moves", lambda: parts.Copying(lambda _: False), culprit="engine", check="canary|weight_sync"
    ),
    engine(
        "one layer is never synced",
        lambda: parts.Copying(lambda name: "layers.1." not in name),
        culprit="engine",
        check="canary|weight_sync",
    ),
    engine(
        "engine samples at another temperature",
        lambda: parts.Altering(request=parts.at_temperature_one),
        culprit="engine",
        check="canary|weight_sync",
    ),
    engine(
        "engine samples rollouts alone at another temperature",
        lambda: parts.Altering(request=parts.only_in_rollouts),
        check="weight_sync",
    ),
    user(
        "raw KL overwritten in place",
        partial(parts.InPlaceKL, 0.1),
        culprit="token_reward of reference_kl",
        check="edits",
        options=PPO,
    ),
    user(
        "rows without reward in the mean",
        NoEOSMask,
        culprit="estimator over_everyone",
        check="excluded_rows",
        options={"advantages": parts.over_everyone},
    ),
    Fault(
        "advantages of the wrong sign",
        "estimator mean_minus_score",
        check="advantage_direction",
        options={"advantages": parts.mean_minus_score},
    ),
    Fault(
        "batch mean for a group mean",
        "estimator over_the_batch",
        check="group_isolation",
        options={"advantages": parts.over_the_batch},
    ),
    Fault(
        "groups by position in the estimator",
        "estimator by_position",
        check="row_order",
        options={"advantages": parts.by_position},
    ),
    Fault(
        "advantages of the row before",
        "estimator",
        check="row_order",
        patches=[
            after(lightning_rl.testing.properties.case, "estimate_advantages", patches.other_rows),
            after(lightning_rl.rollouts.estimate_signal, "estimate_advantages", patches.other_rows),
        ],
    ),
    Fault(
        "advantages outside of the valid tokens",
        "estimator SpreadTooFar",
        check="advantage_support",
        options={"advantages": parts.SpreadTooFar()},
    ),
    Fault(
        "score lost at a masked token",
        "shaped reward",
        check="reward_conservation",
        options=PPO,
        patches=[
            patch.object(lightning_rl.rollouts.estimate_signal, "shaped_rewards", patches.score_at_the_last_position)
        ],
    ),
    user(
        "denominators per microbatch",
        KL,
        culprit="reduction",
        check="partition",
        options=SMALL,
        patches=[patch.object(StepWeights, "of", patches.per_microbatch)],
    ),
    user(
        "denominator after rejection",
        parts.PostRejection,
        culprit="stage update",
        check="denominators",
        options=STEPS,
        patches=[after(lightning_rl.algorithm, "_times", patches.renormalized)],
    ),
    user(
        "token-wise OPSM",
        partial(parts.TokenwiseOPSM, 0.0001),
        culprit="tokenwise_opsm.token_mask",
        check="sequence_decisions",
        options={**PPO, **STEPS},
    ),
    user(
        "detached KL loss",
        partial(parts.DetachedKL, 0.1, as_loss=True),
        culprit="reference_kl.loss_term",
        check="gradient_liveness",
    ),
    Fault(
        "loss without a gradient",
        "loss without_gradient",
        check="gradient_liveness",
        options={"loss": parts.without_gradient},
    ),
    user(
        "ratio counted twice",
        correction(token_weight=parts.twice, reads_at_loss=("rollout_logprobs",)),
        culprit="twice.token_weight",
        check="joint_ratio",
        options=STEPS,
    ),
    user(
        "weights that leave one token",
        correction(token_weight=parts.exploding),
        culprit="exploding.token_weight",
        check="weights_keep_samples",
    ),
    user(
        "metrics after rejection",
        parts.PostRejection,
        culprit="post_rejection.metrics",
        check="metric_populations",
        options=STEPS,
    ),
    user("metrics over padding", parts.Unmasked, culprit="unmasked.metrics", check="metric_populations"),
    user(
        "logged KL is the penalty",
        KL,
        culprit="kl/ref",
        check="logged_metrics",
        patches=[after(lightning_rl.algorithm, "policy_metrics", patches.shaped_kl)],
    ),
    Fault(
        "rewards of the row before",
        "stage generate",
        check="reward_rows",
        patches=[after(Rewards, "fill", lambda rows, *_: rows.replace(rewards=rows.rewards.roll(1)))],
    ),
    Fault(
        "a reward of the place in the list", "reward by_row", check="reward_order", options={"rewards": parts.by_row}
    ),
    rows("the last token of a response masked", patches.without_last_token, check="trained_tokens"),
    Fault(
        "a group lost after the draw",
        "stage generate",
        check="sample_conservation",
        patches=[after(Collector, "fill_groups", patches.without_first_group)],
    ),
    Fault(
        "temperature applied twice",
        "before the update",
        check="logprob_alignment",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.twice_the_temperature)],
    ),
    Fault(
        "packed sequences see each other",
        "",
        check="logprob_alignment|weight_sync|canary",
        patches=[patch.object(lightning_rl.policy.attention, "_runs", patches.one_sequence)],
    ),
    engine(
        "a cache that holds another prompt", lambda: parts.Altering(request=parts.another_prefix), check="weight_sync"
    ),
    user(
        "a reference that follows the policy",
        KL,
        parts.MovingReference,
        culprit="callback moving_reference",
        check="reference_stays",
    ),
    Fault(
        "values divided by the temperature",
        "the value head",
        check="values_ignore_temperature",
        options=PPO,
        patches=[patch.object(PolicyModel, "_values", patches.divided_values)],
    ),
    user(
        "a KL loss of the wrong sign",
        partial(parts.Repelling, 0.1, as_loss=True),
        culprit="reference_kl.loss_term",
        check="distances_pull_back",
        options=STEPS,
    ),
    user(
        "a KL reward of the wrong sign",
        partial(parts.Rewarding, 0.1),
        culprit="reference_kl.token_reward",
        check="distances_pull_back",
        options=PPO,
    ),
    Fault(
        "a loss of the wrong sign", "loss wrong_way", check="loss_direction", options={"loss": parts.wrong_way, **STEPS}
    ),
    Fault(
        "a knob of the loss without effect",
        "loss ClippedSurrogate",
        check="knob_liveness",
        options={"loss": ClippedSurrogate(dual_clip=1.5), **STEPS},
        patches=[patch.object(ClippedSurrogate, "__call__", patches.deaf_to_dual_clip)],
    ),
    user(
        "a knob of a correction without effect",
        partial(parts.DeafPenalty, 8, 4, coef=0.3),
        culprit="callback overlong_penalty",
        check="knob_liveness",
    ),
    user("weights that are drawn", parts.Random, culprit="random.token_weight", check="contributions_fit"),
    Fault(
        "a mean over padding",
        "estimator OverPadding",
        check="padding_width",
        options={"advantages": parts.OverPadding()},
    ),
    Fault(
        "a division by the longest response",
        "estimator OverTheLongest",
        check="padding_width",
        options={"advantages": parts.OverTheLongest()},
    ),
    Fault(
        "advantages of the first token alone",
        "estimator FirstTokenAlone",
        check="advantage_support",
        options={"advantages": parts.FirstTokenAlone()},
    ),
    user(
        "masked values not cleaned",
        KL,
        correction(loss_term=parts.log_outside),
        culprit="",
        check="loss_masked_values",
        options=STEPS,
        patches=[
            patch.object(Rollout, "sanitize", lambda self: self),
            patch.object(lightning_rl.algorithm, "masked_fill_invalid", lambda values, mask: values * mask),
        ],
    ),
    user(
        "the entropy bonus left out",
        partial(EntropyBonus, 0.1),
        culprit="objective",
        check="terms_add_up",
        patches=[after(Algorithm, "microbatch_loss", patches.without_entropy_bonus)],
    ),
    Fault(
        "a mean over microbatches",
        "accumulation",
        check="step_gradient",
        options=SMALL,
        patches=[patches.accumulating(patches.mean_over_microbatches)],
    ),
    Fault(
        "the last microbatch alone",
        "accumulation",
        check="parameter_gradient",
        options=SMALL,
        patches=[patches.accumulating(patches.last_microbatch_alone)],
    ),
    Fault(
        "each microbatch clipped",
        "clipping",
        check="parameter_gradient",
        options=SMALL,
        patches=[patches.accumulating(patches.clipping_each_microbatch)],
    ),
    Fault(
        "clipping without effect",
        "clipping",
        check="parameter_gradient",
        options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", patches.unclipped)],
    ),
    Fault(
        "the gradient norm logged after clipping",
        "clipping",
        check="parameter_gradient",
        options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", lambda norm, *_: norm.clamp(max=0.01))],
    ),
    Fault(
        "an optimizer without half of the parameters",
        "optimizer AdamW, parameter",
        check="optimizer_moves",
        options={"optimizer": parts.without_some},
    ),
    Fault(
        "a scheduler that steps twice", "scheduler", check="optimizer_moves", options={"lr_scheduler": parts.Doubled}
    ),
    Fault(
        "the old policy taken from the current one",
        "stage update",
        check="step_gradient",
        options=STEPS,
        patches=[after(lightning_rl.update, "loss_view", patches.ever_on_policy)],
    ),
    user(
        "another rollout in the middle of a cycle",
        parts.Swapping,
        culprit="swapping.on_train_batch_start",
        check="raw_fields",
        options=STEPS,
    ),
    Fault(
        "the KL to the engine the wrong way round",
        "metric kl/rollout",
        check="logged_metrics",
        options=STEPS,
        patches=[
            after(
                lightning_rl.algorithm,
                "policy_metrics",
                patches.logging(
                    "kl/rollout",
                    lambda view: Stat.of(k3(view.logprobs, view.require("rollout_logprobs")), view.valid_tokens),
                ),
            )
        ],
    ),
)
