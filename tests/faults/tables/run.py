"""The first faults: along a run from the draw to the log, and which check has to say so of whom."""

from functools import partial
from unittest.mock import patch

import torch
from torch.optim.lr_scheduler import LambdaLR

import lightning_rl.algorithm
import lightning_rl.audit.evidence
import lightning_rl.module
import lightning_rl.policy.attention
import lightning_rl.rollouts.estimate_signal
import lightning_rl.update
from faults import parts, patches
from faults.fault import Fault
from faults.patches import after, change_rows
from lightning_rl import GAE, ClippedSurrogate, Rollout, Stat
from lightning_rl.algorithm import Algorithm
from lightning_rl.callbacks import EntropyBonus, NoEOSMask, ReferenceKL
from lightning_rl.corrections import Corrections
from lightning_rl.distributed import Parallel
from lightning_rl.policy import PolicyModel, Scorer
from lightning_rl.rewards import Rewards
from lightning_rl.rollouts import collate
from lightning_rl.rollouts.sample import Sampler
from lightning_rl.signal.kl import k3
from lightning_rl.update import StepWeights

STEPS = {"minibatches_per_rollout": 2, "epochs_per_rollout": 1}
PPO = {"advantages": GAE(), "critic": "shared"}
KL = partial(ReferenceKL, 0.1, as_loss=True)
SMALL = {"max_tokens_per_microbatch": 24}

FAULTS: tuple[Fault, ...] = (
    Fault("token ids of another row", "trained_tokens", "stage draw", patches=[change_rows(patches.rolled_ids)]),
    Fault(
        "finish reason from the padded width",
        "trained_tokens",
        "stage draw",
        patches=[change_rows(patches.finish_by_width)],
    ),
    Fault(
        "rollout log-probabilities in bfloat16",
        "trained_tokens",
        "stage draw",
        patches=[after(collate, "_logprobs", patches.in_bfloat16)],
    ),
    Fault(
        "version read after the response",
        "answers",
        "Altering",
        options={"engine": lambda: parts.Altering(completion=parts.a_version_late)},
    ),
    Fault(
        "a sample counted twice",
        "sample_conservation",
        "stage draw",
        patches=[change_rows(lambda r: r.replace(sample_ids=r.sample_ids // 2 * 2))],
    ),
    Fault(
        "groups of a fixed size by position",
        "sample_conservation",
        "stage draw",
        patches=[change_rows(lambda r: r.replace(groups=torch.arange(len(r)) // 3))],
    ),
    Fault(
        "the sampled EOS dropped",
        "answers",
        "Altering",
        options={"engine": lambda: parts.Altering(completion=parts.without_eos)},
    ),
    Fault(
        "every response called cut off",
        "answers",
        "Altering",
        options={"engine": lambda: parts.Altering(completion=parts.cut_off)},
    ),
    Fault(
        "excluded rows train",
        "masks",
        "trained",
        callbacks=lambda: [NoEOSMask("drop_tokens")],
        patches=[patch.object(lightning_rl.module, "exclude_rows", patches.exclude_nobody)],
    ),
    Fault(
        "reward mask ignored",
        "masks",
        "rewarded",
        callbacks=lambda: [NoEOSMask()],
        patches=[after(Corrections, "reward_mask", lambda mask, *_: torch.ones_like(mask))],
    ),
    Fault(
        "old log-probabilities at temperature 1",
        "logprob_alignment",
        "before the update",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.old_forgets_temperature)],
    ),
    Fault(
        "every forward at temperature 1",
        "logprob_alignment",
        "the policy",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.all_forget_temperature)],
    ),
    Fault(
        "update at temperature 1, without an old pass",
        "logprob_alignment",
        "stage update",
        patches=[patch.object(PolicyModel, "forward", patches.all_forget_temperature)],
    ),
    Fault(
        "old log-probabilities one position late",
        "logprob_alignment",
        "before the update",
        options=STEPS,
        patches=[after(lightning_rl.module, "add_logprobs", patches.one_late)],
    ),
    Fault(
        "noise in the old pass",
        "on_policy_identity",
        "stage score",
        options=STEPS,
        patches=[after(lightning_rl.module, "add_logprobs", patches.noisy)],
    ),
    Fault(
        "reference at temperature 1",
        "logprob_alignment",
        "the reference",
        callbacks=lambda: [KL()],
        patches=[after(Scorer, "__init__", lambda _, scorer, *__: setattr(scorer.scoring, "temperature", 1.0))],
    ),
    Fault(
        "engine that never moves",
        "canary|weight_sync",
        "engine",
        options={"engine": lambda: parts.Copying(lambda _: False)},
    ),
    Fault(
        "one layer is never synced",
        "canary|weight_sync",
        "engine",
        options={"engine": lambda: parts.Copying(lambda name: "layers.1." not in name)},
    ),
    Fault(
        "engine samples at another temperature",
        "canary|weight_sync",
        "engine",
        options={"engine": lambda: parts.Altering(request=parts.at_temperature_one)},
    ),
    Fault(
        "engine samples rollouts alone at another temperature",
        "weight_sync",
        "Altering",
        options={"engine": lambda: parts.Altering(request=parts.only_in_rollouts)},
    ),
    Fault(
        "raw KL overwritten in place",
        "edits",
        "token_reward of reference_kl",
        callbacks=lambda: [parts.InPlaceKL(0.1)],
        options=PPO,
    ),
    Fault(
        "advantages edited between steps",
        "edits",
        "late_edit.on_train_batch_end",
        callbacks=lambda: [parts.LateEdit()],
        options=STEPS,
    ),
    Fault(
        "rows without reward in the mean",
        "excluded_rows",
        "estimator over_everyone",
        callbacks=lambda: [NoEOSMask()],
        options={"advantages": parts.over_everyone},
    ),
    Fault(
        "batch mean for a group mean",
        "group_isolation",
        "estimator over_the_batch",
        options={"advantages": parts.over_the_batch},
    ),
    Fault(
        "groups by position in the estimator",
        "row_order",
        "estimator by_position",
        options={"advantages": parts.by_position},
    ),
    Fault(
        "advantages of the row before",
        "row_order",
        "estimator",
        patches=[
            after(lightning_rl.audit.evidence, "estimate_signal", patches.other_rows),
            after(lightning_rl.module, "estimate_signal", patches.other_rows),
        ],
    ),
    Fault(
        "advantages outside of the valid tokens",
        "advantage_support",
        "estimator SpreadTooFar",
        options={"advantages": parts.SpreadTooFar()},
    ),
    Fault(
        "score lost at a masked token",
        "reward_conservation",
        "shaped reward",
        options=PPO,
        patches=[
            patch.object(lightning_rl.rollouts.estimate_signal, "shaped_rewards", patches.score_at_the_last_position)
        ],
    ),
    Fault(
        "denominators per microbatch",
        "partition",
        "reduction",
        callbacks=lambda: [KL()],
        options=SMALL,
        patches=[patch.object(StepWeights, "of", patches.per_microbatch)],
    ),
    Fault(
        "denominator after rejection",
        "denominators",
        "post_rejection",
        callbacks=lambda: [parts.PostRejection()],
        options=STEPS,
        patches=[after(lightning_rl.algorithm, "_times", patches.renormalized)],
    ),
    Fault(
        "token-wise OPSM",
        "sequence_decisions",
        "tokenwise_opsm.token_mask",
        callbacks=lambda: [parts.TokenwiseOPSM(1e-4)],
        options={**PPO, **STEPS},
    ),
    Fault(
        "detached KL loss",
        "gradient_liveness",
        "reference_kl.loss_term",
        callbacks=lambda: [parts.DetachedKL(0.1, as_loss=True)],
    ),
    Fault(
        "loss without a gradient",
        "gradient_liveness",
        "loss without_gradient",
        options={"loss": parts.without_gradient},
    ),
    Fault(
        "ratio counted twice",
        "ratio_counts_once",
        "twice.token_weight",
        callbacks=lambda: [parts.Twice()],
        options=STEPS,
    ),
    Fault(
        "weights that leave one token",
        "weights_keep_samples",
        "exploding.token_weight",
        callbacks=lambda: [parts.Exploding()],
    ),
    Fault(
        "metrics after rejection",
        "metric_populations",
        "post_rejection.metrics",
        callbacks=lambda: [parts.PostRejection()],
        options=STEPS,
    ),
    Fault(
        "metrics over padding",
        "metric_populations",
        "unmasked.metrics",
        callbacks=lambda: [parts.Unmasked()],
        sound={"callbacks": lambda: [parts.Unmasked(masked=True)]},
    ),
    Fault(
        "logged KL is the penalty",
        "raw_kl",
        "kl/ref",
        callbacks=lambda: [KL()],
        patches=[after(lightning_rl.algorithm, "policy_metrics", patches.shaped_kl)],
    ),
    Fault(
        "logged KL over padding",
        "raw_kl",
        "kl/ref",
        callbacks=lambda: [KL()],
        patches=[after(lightning_rl.algorithm, "policy_metrics", patches.unmasked_kl)],
    ),
    Fault(
        "rewards of the row before",
        "reward_rows",
        "stage draw",
        patches=[after(Rewards, "__call__", lambda scores, *_: scores._replace(total=scores.total.roll(1)))],
    ),
    Fault("a reward of the place in the list", "reward_order", "reward by_row", options={"rewards": parts.by_row}),
    Fault(
        "the last token of a response masked",
        "trained_tokens",
        "stage draw",
        patches=[change_rows(patches.without_last_token)],
    ),
    Fault(
        "groups of the row before",
        "sample_conservation",
        "stage draw",
        patches=[change_rows(lambda rollout: rollout.replace(groups=rollout.groups.roll(1)))],
    ),
    Fault(
        "a group lost after the draw",
        "sample_conservation",
        "stage draw",
        patches=[after(Sampler, "fill_groups", patches.without_first_group)],
    ),
    Fault(
        "temperature applied twice",
        "logprob_alignment",
        "before the update",
        options=STEPS,
        patches=[patch.object(PolicyModel, "forward", patches.twice_the_temperature)],
    ),
    Fault(
        "packed sequences see each other",
        "logprob_alignment|packing|weight_sync|canary",
        "",
        patches=[patch.object(lightning_rl.policy.attention, "_runs", patches.one_sequence)],
    ),
    Fault(
        "a cache that holds another prompt",
        "weight_sync",
        "Altering",
        options={"engine": lambda: parts.Altering(request=parts.another_prefix)},
    ),
    Fault(
        "a reference that follows the policy",
        "reference_stays",
        "the reference",
        callbacks=lambda: [KL(), parts.MovingReference()],
    ),
    Fault(
        "values divided by the temperature",
        "values_ignore_temperature",
        "the value head",
        options=PPO,
        patches=[patch.object(PolicyModel, "_values", patches.divided_values)],
    ),
    Fault(
        "a KL loss of the wrong sign",
        "distances_pull_back",
        "reference_kl.loss_term",
        callbacks=lambda: [parts.Repelling(0.1, as_loss=True)],
        options=STEPS,
    ),
    Fault(
        "a KL reward of the wrong sign",
        "distances_pull_back",
        "reference_kl.token_reward",
        callbacks=lambda: [parts.Rewarding(0.1)],
        options=PPO,
    ),
    Fault("a loss of the wrong sign", "loss_direction", "loss wrong_way", options={"loss": parts.wrong_way, **STEPS}),
    Fault(
        "a knob of the loss without effect",
        "knob_liveness",
        "loss ClippedSurrogate",
        options={"loss": ClippedSurrogate(dual_clip=1.5), **STEPS},
        patches=[patch.object(ClippedSurrogate, "__call__", patches.deaf_to_dual_clip)],
    ),
    Fault(
        "a knob of a correction without effect",
        "knob_liveness",
        "callback overlong_penalty",
        callbacks=lambda: [parts.DeafPenalty(8, 4, coef=0.3)],
    ),
    Fault("weights that are drawn", "contributions_fit", "random.token_weight", callbacks=lambda: [parts.Random()]),
    Fault("a mean over padding", "padding_width", "estimator OverPadding", options={"advantages": parts.OverPadding()}),
    Fault(
        "advantages of the first token alone",
        "advantage_support",
        "estimator FirstTokenAlone",
        options={"advantages": parts.FirstTokenAlone()},
    ),
    Fault(
        "masked values not cleaned",
        "loss_masked_values",
        "",
        callbacks=lambda: [KL(), parts.LogOutside()],
        sound={"callbacks": lambda: [KL(), parts.LogOutside()]},
        options=STEPS,
        patches=[
            patch.object(Rollout, "sanitize", lambda self: self),
            patch.object(lightning_rl.algorithm, "masked_fill_invalid", lambda values, mask: values * mask),
        ],
    ),
    Fault(
        "the entropy bonus left out",
        "terms_add_up",
        "objective",
        callbacks=lambda: [EntropyBonus(0.1)],
        patches=[after(Algorithm, "microbatch_loss", patches.without_entropy_bonus)],
    ),
    Fault(
        "a mean over microbatches",
        "step_gradient",
        "accumulation",
        options=SMALL,
        patches=[patches.accumulating(patches.mean_over_microbatches)],
    ),
    Fault(
        "the last microbatch alone",
        "parameter_gradient",
        "accumulation",
        options=SMALL,
        patches=[patches.accumulating(patches.last_microbatch_alone)],
    ),
    Fault(
        "each microbatch clipped",
        "parameter_gradient",
        "clipping",
        options=SMALL,
        patches=[patches.accumulating(patches.clipping_each_microbatch)],
    ),
    Fault(
        "clipping without effect",
        "parameter_gradient",
        "clipping",
        options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", patches.unclipped)],
    ),
    Fault(
        "the gradient norm logged after clipping",
        "parameter_gradient",
        "clipping",
        options={"max_grad_norm": 0.01},
        patches=[after(Parallel, "clipped_norm", lambda norm, *_: norm.clamp(max=0.01))],
    ),
    Fault(
        "an optimizer without half of the parameters",
        "optimizer_moves",
        "optimizer AdamW, parameter",
        options={"optimizer": parts.without_some},
    ),
    Fault(
        "a scheduler that steps twice",
        "optimizer_moves",
        "scheduler",
        options={"lr_scheduler": parts.Doubled},
        sound={"options": lambda: {"lr_scheduler": partial(LambdaLR, lr_lambda=lambda step: 0.8**step)}},
    ),
    Fault(
        "the old policy taken from the current one",
        "step_gradient",
        "stage update",
        options=STEPS,
        patches=[after(lightning_rl.update, "loss_view", patches.ever_on_policy)],
    ),
    Fault(
        "another rollout in the middle of a cycle",
        "raw_fields",
        "swapping.on_train_batch_start",
        callbacks=lambda: [parts.Swapping()],
        options=STEPS,
    ),
    Fault(
        "length logged as the padded width",
        "logged_metrics",
        "metric length/mean",
        patches=[
            after(
                lightning_rl.rollouts.estimate_signal,
                "reward_metrics",
                patches.logging("length/mean", lambda rollout: Stat.of(torch.full((len(rollout),), rollout.width))),
            )
        ],
    ),
    Fault(
        "entropy logged over masked tokens",
        "logged_metrics",
        "metric policy/entropy",
        patches=[
            after(
                lightning_rl.algorithm,
                "policy_metrics",
                patches.logging("policy/entropy", lambda view: Stat.of(view.entropy)),
            )
        ],
    ),
    Fault(
        "the KL to the engine the wrong way round",
        "raw_kl",
        "metric kl/rollout",
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
