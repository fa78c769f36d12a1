"""Puts each known silent bug back into a copy of the tree and expects the test that is named after it to turn red.

Mutations of losses and corrections run the tests of their file in the same way.

    python -m tests.mutations            # all of them
    python -m tests.mutations 1_03 2_12  # those whose test has such a name

Exits with 1 if a bug survives or if a test is red without one.
"""

import contextlib
import io
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("lightning_rl", "callbacks", "recipes", "tests", "pyproject.toml")
BUGS = "tests/quiet_bugs"
OPTIONS = ["-q", "--tb=short", "-p", "no:cacheprovider"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are preloaded by others
PRELOADED = ["torch", "lightning.pytorch", "transformers.models.qwen2.modeling_qwen2", "torchmetrics"]


class Mutation(NamedTuple):
    """A bug: in ``file``, ``old`` becomes ``new``, which ``test`` has to notice."""

    test: str
    file: str
    old: str
    new: str
    where: str = BUGS  # file or folder of the test


# fmt: off
MUTATIONS = [Mutation(*entry) for entry in [
    ("test_1_01_shaping_leaves_the_raw_kl_alone", "lightning_rl/signal/shaped_rewards.py",
     "return masked_fill_invalid(token_rewards, valid_tokens) + scalar", "return token_rewards.add_(scalar)"),
    ("test_1_02_whitening_runs_over_all_ranks_and_every_rank_takes_part", "lightning_rl/signal/masked.py",
     "global_sum(exact.sum())", "exact.sum()"),
    ("test_1_02_whitening_runs_over_all_ranks_and_every_rank_takes_part", "lightning_rl/advantages/gae.py",
     "if self.whitened else raw, returns", "if self.whitened and valid.any() else raw, returns"),
    ("test_1_03_dual_clip_reaches_the_loss", "lightning_rl/losses/clipped_surrogate.py",
     "if self.dual_clip is None:", "if True:"),
    ("test_1_04_tool_tokens_do_not_shrink_the_gradient", "lightning_rl/signal/reductions.py",
     "global_sum(valid_tokens.sum().double())", "global_sum(torch.tensor(float(valid_tokens.numel())))"),
    ("test_1_05_the_gradient_is_that_of_the_whole_step_for_every_split_and_number_of_ranks",
     "lightning_rl/update.py", "backward(loss.total)", "backward(loss.total / len(microbatches))"),
    ("test_1_05_the_gradient_is_that_of_the_whole_step_for_every_split_and_number_of_ranks",
     "lightning_rl/update.py",
     "trained, groups, self.global_sum", "trained, groups, lambda own: own"),
    ("test_1_06_a_penalty_at_a_masked_token_reaches_no_return", "lightning_rl/signal/shaped_rewards.py",
     "return masked_fill_invalid(token_rewards, valid_tokens) + scalar", "return token_rewards + scalar"),
    ("test_1_07_every_source_of_log_probabilities_knows_the_temperature", "lightning_rl/policy/model.py",
     "_score(self.model, states, layout, self.temperature)\n", "_score(self.model, states, layout, 1.0)\n"),
    ("test_1_07_every_source_of_log_probabilities_knows_the_temperature", "lightning_rl/policy/model.py",
     "PolicyModel(model, None, temperature=temperature, ", "PolicyModel(model, None, temperature=1.0, "),
    ("test_1_07_every_source_of_log_probabilities_knows_the_temperature", "lightning_rl/generation/transformers.py",
     'recorded."""\n        return scores', 'recorded."""\n        return live.logits.log_softmax(-1)'),
    ("test_1_08_values_are_never_divided_by_the_temperature", "lightning_rl/policy/model.py",
     "return layout.scatter(flat)", "return layout.scatter(flat / self.temperature)"),
    ("test_1_09_taking_sequences_apart_and_joining_them_is_the_identity_with_its_gradient",
     "lightning_rl/policy/packing.py",
     ".index_select(0, drawn - 1)", ".index_select(0, drawn)"),
    ("test_1_09_taking_sequences_apart_and_joining_them_is_the_identity_with_its_gradient",
     "lightning_rl/policy/packing.py",
     ".index_put((self.rows, self.columns), flat)", ".index_put((self.rows, self.columns), flat.detach())"),
    ("test_1_10_a_metric_of_correct_samples_joins_by_identity_and_not_by_position", "lightning_rl/policy/plan.py",
     ".select(self.index, width", ".select(torch.arange(len(self.index)), width"),
    ("test_1_11_every_finished_group_is_trained_on_or_counted_as_filtered", "lightning_rl/rollouts/collector.py",
     "parts.append(part.select(keep))", "parts = [part.select(keep)]"),
    ("test_1_12_a_log_probability_is_missing_for_no_token", "lightning_rl/generation/validate_completions.py",
     "sound and scores.shape == (number,)", "sound and scores.dim() == 1"),
    ("test_1_12_every_field_of_a_token_has_the_length_of_the_response", "lightning_rl/fields.py",
     "if (value.shape if exact else value.shape[: len(expected)]) != expected:",
     "if value.shape[:1] != expected[:1]:"),
    ("test_1_13_metrics_count_the_population_before_rejection", "lightning_rl/corrections/combine.py",
     "rejected | weights, view.valid_tokens)", "rejected | weights, view.valid_tokens & (factor != 0))"),
    ("test_1_13_metrics_count_the_population_before_rejection", "callbacks/ice_pop.py",
     "raw = Stat.of(self._ratio(view), view.valid_tokens)",
     "raw = Stat.of(self._ratio(view), view.valid_tokens & self.token_mask(view))"),
    ("test_1_14_log_probabilities_of_the_engine_keep_their_precision", "lightning_rl/rollout.py",
     "spread(_logprobs_of(sampled)", "spread(_logprobs_of(sampled).bfloat16()"),
    ("test_1_14_an_engine_in_half_precision_returns_log_probabilities_in_float32",
     "lightning_rl/generation/transformers.py",
     "exact = torch.promote_types(model.dtype, torch.float32)", "exact = model.dtype"),
    ("test_1_15_a_kl_term_alone_has_a_gradient", "lightning_rl/signal/kl.py",
     "return 0.5 * (logprobs - other).square()", "return 0.5 * (logprobs - other).detach().square()"),
    ("test_1_15_the_slope_along_a_coefficient_is_the_logged_term", "lightning_rl/algorithm.py",
     "total = total + term.coef * parts[", "total = total + parts["),
    ("test_1_16_neither_loss_nor_gradient_depends_on_the_size_of_a_microbatch", "lightning_rl/update.py",
     "loss = algorithm.microbatch_loss(view, lambda reduction: weights.of(reduction, microbatch))",
     "loss = algorithm.microbatch_loss("
     "view, lambda r: r(view.valid_tokens, view.trained, view.groups) / len(microbatches))"),
    ("test_1_17_a_logged_loss_is_the_sum_over_ranks_and_the_norm_is_no_sum", "lightning_rl/update.py",
     "scale = float(world_size)", "scale = 1.0"),
    ("test_1_18_an_advantage_stands_at_every_valid_token_of_its_own_row", "lightning_rl/advantages/estimator.py",
     "torch.where(self.valid_tokens, per_row", "torch.where(self.valid_tokens[-1:], per_row"),
    ("test_1_19_not_even_a_term_that_is_nan_at_masked_tokens_leaks", "lightning_rl/algorithm.py",
     "(masked_fill_invalid(per_token, valid) * weights)", "(per_token * weights)"),
    ("test_1_20_padding_carries_exactly_the_fields_of_what_it_pads", "lightning_rl/rollout.py",
     "return self._each(lambda axis, value, pad: axis.padding(value, number, pad))",
     "return self.replace(token_extras={})._each(lambda axis, value, pad: axis.padding(value, number, pad))"),
    ("test_1_20_a_microbatch_without_a_valid_token_still_takes_part", "lightning_rl/update.py",
     "gradient.add(loss)", "gradient.add(loss) if rollout.valid_tokens[microbatch.index].any() else None"),
    ("test_1_21_every_field_follows_its_sample", "lightning_rl/rollout.py",
     "{key: operation(axis, entry, pad) for key, entry in value.items()}",
     "{key: entry[: len(operation(axis, entry, pad))] for key, entry in value.items()}"),
    ("test_1_21_a_pass_that_only_scores_leaves_nothing_behind", "lightning_rl/policy/packing.py",
     "_FORWARD.reset(token)", "pass"),
    ("test_1_22_a_log_probability_stands_where_its_token_stands", "lightning_rl/policy/packing.py",
     "columns=column,", "columns=rows.width - rows.response_lengths[row] + column,"),
    ("test_1_23_gradients_of_microbatches_add_up", "lightning_rl/update.py",
     "backward(loss.total)", "[cell.cell_contents.zero_grad() for cell in forward.__closure__], backward(loss.total)"),
    ("test_1_24_an_advantage_at_a_masked_token_is_in_no_mean", "lightning_rl/signal/masked.py",
     "masked_fill_invalid(values, mask).sum(-1) /", "values.sum(-1) /"),
    ("test_1_24_a_failed_sample_shifts_no_other_group", "lightning_rl/signal/masked.py",
     "groups.sort()", "(torch.arange(len(groups)) // 4).sort()"),
    ("test_1_25_the_version_of_a_token_is_pinned_when_its_request_is_sent", "lightning_rl/rollout.py",
     "spread(_versions_of(sampled), -1)", "spread(_versions_of(sampled)[-1:].repeat(int(actions.sum())), -1)"),
    ("test_1_25_a_mean_is_a_global_sum_over_a_global_count", "lightning_rl/corrections/stat.py",
     "joint = (count * mean).sum(0) / total.clamp(min=1)", "joint = mean.mean(0)"),
    ("test_2_01_a_base_that_is_nan_at_a_masked_token_spoils_no_gradient", "lightning_rl/algorithm.py",
     "view = view.sanitize()", "view = view.sanitize() if view.ref_logprobs is None else view"),
    ("test_2_02_whitening_does_not_see_padding", "lightning_rl/signal/masked.py",
     "global_sum(mask.sum().double())", "global_sum(torch.ones_like(mask).sum().double())"),
    ("test_2_03_the_reward_of_a_masked_row_moves_no_other_row", "lightning_rl/rollouts/estimate_signal.py",
     "rewarded=rollout.rewarded,", "rewarded=rollout.trained,"),
    ("test_2_04_extremes_and_deviations_count_valid_tokens_alone", "lightning_rl/corrections/stat.py",
     "stacked.masked_fill_(left_out, -torch.inf)", "stacked.masked_fill_(left_out, 0.0)"),
    ("test_2_04_extremes_and_deviations_count_valid_tokens_alone", "lightning_rl/corrections/stat.py",
     "(stacked - mean[:, None]).masked_fill_(left_out, 0.0)", "(stacked - mean[:, None])"),
    ("test_2_05_kl_and_entropy_do_not_depend_on_microbatches_or_masked_rows", "lightning_rl/algorithm.py",
     "_reduce(per_token, term_weights, valid)", "per_token[valid].mean()"),
    ("test_2_05_kl_and_entropy_do_not_depend_on_microbatches_or_masked_rows", "lightning_rl/algorithm.py",
     "_reduce(per_token, term_weights, valid)", "masked_fill_invalid(per_token, valid).mean()"),
    ("test_2_06_masked_tokens_are_no_time_steps", "lightning_rl/signal/discounted_returns.py",
     "tokens[valid_tokens])", "tokens)"),
    ("test_2_06_masked_tokens_are_no_time_steps", "lightning_rl/signal/discounted_returns.py",
     "at_right(rewards), at_right(values)", "at_right(rewards), values[:, :width]"),
    ("test_2_07_a_correction_without_its_log_probabilities_is_an_error", "callbacks/outlier_mask.py",
     '("old_logprobs", "rollout_logprobs")', '("old_logprobs",)'),
    ("test_2_07_a_correction_without_its_log_probabilities_is_an_error", "lightning_rl/rollout.py",
     "if key else getattr(self, stem)\n",
     "if key else getattr(self, stem) if getattr(self, stem) is not None else self.response_ids * 0.0\n"),
    ("test_2_08_whitening_a_constant_gives_zero", "lightning_rl/signal/masked.py",
     "exact = masked_fill_invalid(values, mask).double()", "exact = masked_fill_invalid(values, mask)"),
    ("test_2_08_whitening_survives_a_large_offset_and_nan_at_a_masked_token", "lightning_rl/signal/masked.py",
     "global_sum(deviation.square().sum())",
     "(exact.float().square().sum() - number * mean.float().square()).double()"),
    ("test_2_09_the_reward_of_a_short_row_stands_at_its_own_last_token", "lightning_rl/signal/shaped_rewards.py",
     "torch.where(last_true(valid_tokens),", "torch.where(last_true(torch.ones_like(valid_tokens)),"),
    ("test_2_10_the_divergence_from_the_engine_counts_valid_tokens_once", "lightning_rl/algorithm.py",
     "stats = Stat.many(values, valid)", "stats = Stat.many(values, torch.ones_like(valid))"),
    ("test_2_10_the_divergence_from_the_engine_counts_valid_tokens_once", "lightning_rl/corrections/stat.py",
     "sum(-1) / count.clamp(min=1)", "sum(-1) / count"),
    ("test_2_11_seven_samples_are_a_group_of_four_and_one_of_three", "lightning_rl/signal/masked.py",
     "groups.sort()", "torch.zeros_like(groups).sort()"),
    ("test_2_12_a_drifted_bad_response_is_rejected_as_a_whole", "lightning_rl/corrections/combine.py",
     "mask[:, None].expand_as(view.valid_tokens)", "(mask[:, None] | (view.require('advantages') > 0))"),
    ("test_2_12_a_drifted_bad_response_is_rejected_as_a_whole", "lightning_rl/corrections/combine.py",
     "Stat.of(~mask, view.trained)", "Stat.of(~mask * view.valid_tokens.sum(-1), view.trained)"),
    ("test_2_12_a_drifted_bad_response_is_rejected_as_a_whole", "lightning_rl/signal/masked.py",
     "masked_fill_invalid(values, mask).sum(-1) /", "(values * mask).sum(-1) /"),
    ("test_2_12_a_removed_row_is_in_no_statistic", "lightning_rl/rollouts/estimate_signal.py",
     "rewarded=rollout.rewarded & trained", "rewarded=rollout.rewarded"),
    ("test_2_13_shaping_is_masked_and_an_empty_response_is_no_error", "lightning_rl/signal/shaped_rewards.py",
     "return masked_fill_invalid(token_rewards, valid_tokens) + scalar", "return token_rewards + scalar"),
    ("test_2_13_shaping_is_masked_and_an_empty_response_is_no_error", "lightning_rl/signal/shaped_rewards.py",
     "torch.where(last_true(valid_tokens),",
     "torch.where(last_true(valid_tokens | ~valid_tokens.any(-1, keepdim=True)),"),
    ("test_2_14_a_response_is_truncated_if_its_engine_says_so_and_not_if_it_fills_the_width",
     "callbacks/no_eos_mask.py",
     "return ~rollout.truncated", "return rollout.response_lengths < rollout.width"),
    ("test_2_15_no_reward_is_lost_at_a_masked_last_token", "lightning_rl/signal/shaped_rewards.py",
     "torch.where(last_true(valid_tokens),", "torch.where(last_true(torch.ones_like(valid_tokens)) & valid_tokens,"),
    ("test_2_16_six_of_eight_tokens_weigh_an_eighth_each", "lightning_rl/algorithm.py",
     "_times(raw, factor, valid), weights", "_times(raw, factor, valid) * valid.sum() / (factor != 0).sum(), weights"),
    ("test_2_16_six_of_eight_tokens_weigh_an_eighth_each", "lightning_rl/losses/m2po.py",
     "super().__call__(view), 0.0)",
     "super().__call__(view), 0.0) * view.valid_tokens.sum() / prepared_tokens(view).sum()"),
    ("test_2_17_the_overlong_penalty_can_be_asked_twice", "callbacks/overlong_penalty.py",
     "return self.coef * self._penalty(rollout)", "return rollout.rewards.add_(self.coef * self._penalty(rollout))"),
    ("test_2_18_every_name_that_an_error_offers_is_accepted", "lightning_rl/signal/reductions.py",
     "or reduction not in reductions:", "or reduction not in REDUCTIONS:"),
    ("test_2_18_every_documented_option_is_accepted", "callbacks/opsm.py",
     'check_choices(("old", "rollout"), against=against)', 'check_choices(("old",), against=against)'),
    ("test_2_19_a_row_without_others_has_no_advantage_and_nan_stays_where_it_is",
     "lightning_rl/advantages/group_relative.py",
     "return torch.where(group.spread, relative, 0.0)",
     "return torch.where(group.spread, relative, masked_fill_invalid(scores, rewarded).double())"),
    ("test_2_19_a_rank_without_a_valid_token_joins_every_collective", "lightning_rl/signal/masked.py",
     "    moments = global_moments(values, mask, global_sum)",
     "    if not mask.any():\n        return values\n    moments = global_moments(values, mask, global_sum)"),
    ("test_2_20_poison_at_a_masked_token_reaches_neither_loss_nor_gradient", "lightning_rl/rollout.py",
     "return tensor.masked_fill(mask, 0)", "return tensor * ~mask"),
    ("test_2_21_the_force_back_never_fades_with_drift", "lightning_rl/signal/kl.py",
     "gap = logprobs - other\n", "gap = (logprobs - other).clamp(-2.61, 2.61)\n"),
    ("test_2_22_a_step_draws_no_global_random_number", "lightning_rl/losses/cov.py",
     "shuffled_keys(view.sample_ids, view.width)", "torch.rand(len(view), view.width, dtype=torch.float64)"),
]]

EXPORTS = [Mutation(test, file, old, new, where) for where, test, file, old, new in [
    ("tests/losses/test_witnesses.py", "test_vespo_by_hand", "lightning_rl/losses/vespo.py",
     "geometric=False", "geometric=True"),
    ("tests/losses/test_witnesses.py", "test_vespo_by_hand", "lightning_rl/losses/vespo.py",
     "advantages >= 0, good, bad", "advantages > 0, good, bad"),
    ("tests/losses/test_witnesses.py", "test_dro_is_the_policy_gradient_on_a_quadratic_leash",
     "lightning_rl/losses/dro.py", 'penalty = k2(view.logprobs, view.require(f"{self.anchor}_logprobs"))',
     'penalty = k2(view.logprobs.detach(), view.require(f"{self.anchor}_logprobs"))'),
    ("tests/losses/test_witnesses.py", "test_gspo_may_stand_on_the_rollout_and_bound_bad_responses_twice",
     "lightning_rl/losses/gspo.py", 'view.require(f"{self.anchor}_logprobs")', 'view.require("old_logprobs")'),
    ("tests/losses/test_witnesses.py", "test_gmpo_has_a_bound_of_its_own_on_either_side",
     "lightning_rl/losses/gmpo.py", "-self.clip_low, self.clip_high)", "-self.clip_low, self.clip_low)"),
    ("tests/test_presets.py", "test_luspo_counts_every_token_and_gspo_every_response", "lightning_rl/presets.py",
     '"loss": GSPO(), "reduction": SequenceSumNorm(1)', '"loss": GSPO(), "reduction": sequence_mean'),
    ("tests/callbacks/test_divergence_mask.py", "test_a_token_is_kept_up_to_the_larger_of_both_directions",
     "callbacks/divergence_mask.py", "torch.maximum(binary_kl(logprobs, other), binary_kl(other, logprobs))",
     "binary_kl(logprobs, other)"),
    ("tests/callbacks/test_divergence_mask.py", "test_a_response_goes_by_its_mean_its_sum_or_its_largest",
     "callbacks/divergence_mask.py", "masked_fill_invalid(self._divergence(view), view.valid_tokens)",
     "self._divergence(view).nan_to_num()"),
    ("tests/callbacks/test_total_variation_mask.py", "test_beyond_the_bound_only_what_narrows_the_gap_is_kept",
     "callbacks/total_variation_mask.py", 'view.require("advantages") <= 0', 'view.require("advantages") >= 0'),
    ("tests/callbacks/test_stop_properly.py", "test_a_row_without_reward_gets_none",
     "lightning_rl/corrections/combine.py",
     "masked_fill_invalid(rollout.rewards if replacement is None else replacement, rollout.rewarded)",
     "rollout.rewards if replacement is None else replacement"),
    ("tests/callbacks/test_linear_length_penalty.py", "test_rows_without_reward_have_no_penalty_and_set_none",
     "callbacks/linear_length_penalty.py", "torch.where(rollout.rewarded, rollout.groups, -1)", "rollout.groups"),
    ("tests/callbacks/test_positive_nll.py", "test_the_mean_runs_over_the_valid_tokens_of_right_responses",
     "callbacks/positive_nll.py", "self.minibatches_per_rollout / tokens.clamp(min=1)", "1.0"),
    ("tests/callbacks/test_positive_nll.py", "test_the_modules_reduction_plays_no_part",
     "callbacks/positive_nll.py", ", reduction=token_sum", ""),
    ("tests/callbacks/test_truncated_is.py", "test_normalized_weights_have_a_mean_of_one_over_the_rollout",
     "callbacks/truncated_is.py", 'valid if self.level == "token" else last_true(valid)', "valid"),
    ("tests/callbacks/test_truncated_is.py", "test_weights_may_have_a_floor", "callbacks/truncated_is.py",
     "weight = self._ratio(view).clamp(self.floor, self.cap)\n", "weight = self._ratio(view).clamp(max=self.cap)\n"),
    ("tests/callbacks/test_sequence_ratio_mask.py", "test_keeps_rows_whose_largest_ratio_lies_within",
     "callbacks/sequence_ratio_mask.py", "torch.where(view.valid_tokens, old - rollout, -torch.inf)",
     "(old - rollout)"),
    ("tests/advantages/test_gae_over_turns.py", "test_hand_worked_rows", "lightning_rl/signal/discounted_returns.py",
     "at_turns = by_turn(values, starts)", "at_turns = by_turn(values, valid_tokens)"),
    ("tests/advantages/test_gae_over_turns.py", "test_the_estimator_counts_turns_for_discount_and_decay",
     "lightning_rl/advantages/gae_over_turns.py", "turn_starts(valid, turns).sum(-1)", "valid.sum(-1)"),
    ("tests/advantages/test_gae_over_turns.py", "test_the_critic_learns_with_a_decay_of_its_own",
     "lightning_rl/advantages/gae_over_turns.py", "returns = estimate(self.lam_critic).returns", "pass"),
    ("tests/advantages/test_trace_decay.py", "test_every_row_has_the_decay_of_its_own_valid_tokens",
     "lightning_rl/advantages/gae.py", "valid.sum(-1)", "valid.sum(-1) * 0 + valid.shape[1]"),
    ("tests/advantages/test_trace_decay.py", "test_the_critic_learns_with_a_decay_of_its_own",
     "lightning_rl/advantages/gae.py", "raw if self.lam_critic is None else estimate(self.lam_critic)", "raw"),
    ("tests/advantages/test_trace_decay.py", "test_hand_worked_decays", "lightning_rl/advantages/trace_decay.py",
     "1 / (steps - 1).clamp(min=1)", "1 / steps.clamp(min=1)"),
    ("tests/advantages/test_per_row.py", "test_normalized_at_every_level", "lightning_rl/advantages/normalized.py",
     "batch_statistics(scores, rewarded, global_sum)", "group_statistics(scores, groups, rewarded)"),
    ("tests/advantages/test_pass_at_k.py", "test_hand_worked_groups", "lightning_rl/advantages/pass_at_k.py",
     "group.spread & alone", "group.spread & best"),
    ("tests/advantages/test_gpg.py", "test_rows_of_all_ranks_are_counted", "lightning_rl/advantages/gpg.py",
     "global_sum(torch.stack([rewarded.sum(), counted.sum()]).double())",
     "torch.stack([rewarded.sum(), counted.sum()]).double()"),
    ("tests/advantages/test_gpg.py", "test_hand_worked_batches", "lightning_rl/advantages/gpg.py",
     "rows / number.clamp(min=1)", "number / rows.clamp(min=1)"),
    ("tests/advantages/test_optimal_token_baseline.py", "test_a_row_weighs_as_much_as_its_gradients_so_far",
     "lightning_rl/advantages/optimal_token_baseline.py", "prefix_sums(masked_fill_invalid(sizes, counted).double())",
     "masked_fill_invalid(sizes, counted).double()"),
    ("tests/advantages/test_optimal_token_baseline.py",
     "test_a_row_without_reward_enters_no_baseline_and_keeps_what_its_tokens_are_given",
     "lightning_rl/advantages/optimal_token_baseline.py",
     "sizes, valid & rewarded[:, None], signal", "sizes, valid, signal"),
    ("tests/advantages/test_optimal_token_baseline.py", "test_holes_are_no_steps",
     "lightning_rl/advantages/optimal_token_baseline.py", "steps = (valid.cumsum(-1) - 1).clamp(min=0)",
     "steps = torch.arange(valid.shape[1]).expand(valid.shape)"),
    ("tests/advantages/test_optimal_token_baseline.py", "test_the_ratio_to_the_engine_counts_squared_and_truncated",
     "lightning_rl/advantages/optimal_token_baseline.py", "maximum=self.importance_cap).square()",
     "maximum=self.importance_cap)"),
    ("tests/properties/test_extreme_log_ratios.py", "test_the_rule", "lightning_rl/signal/importance_ratios.py",
     "torch.exp(clamp(logprobs - old_logprobs, -bound, bound))", "torch.exp(logprobs - old_logprobs)"),
    ("tests/properties/test_extreme_log_ratios.py", "test_a_leash_pulls_back_from_any_distance",
     "lightning_rl/signal/kl.py", "return 0.5 * (logprobs - other).square()",
     "return 0.5 * (logprobs - other).clamp(-20, 20).square()"),
    ("tests/signal/test_subgradients.py", "test_formulas_at_their_corners", "lightning_rl/signal/subgradients.py",
     "(values >= low) & (values <= high)", "(values > low) & (values < high)"),
    ("tests/signal/test_kl.py", "test_estimators_have_the_published_values_and_gradients", "lightning_rl/signal/kl.py",
     "* k3(log_p, log_q) + rest_p * k3(rest_p.log(), rest_q.log())", "* (log_p - log_q)"),
]]
"""Ways to break losses, corrections and estimators, each with the test that detects it."""
MEDIA = "lightning_rl/policy/media.py"
ENGINE, INTERNALS = "lightning_rl/generation/vllm/vllm_engine.py", "lightning_rl/generation/vllm/internals.py"
CURES = [Mutation(test, file, old, new, where) for where, test, file, old, new in [
    ("tests/generation/vllm/test_launchers.py", "test_each_rank_has_its_rank_and_its_gpu", INTERNALS,
     "preserving_environment(launch_variables(device)),", "preserving_environment({}),"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_stages_of_trainers_share_an_engine_which_sleeps_between_them",
     ENGINE, "if self._llm is None or self._purpose != purpose:", "if True:"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_an_engine_that_is_closed_in_its_sleep_leaves_room_for_the_next",
     ENGINE, 'if options.get("enable_sleep_mode"):', "if False:"),
    ("tests/generation/vllm/test_output_extras.py",
     "test_an_engine_that_returns_masks_is_sent_a_temperature_and_a_bound_of_the_same_draw",
     "lightning_rl/generation/vllm/output_extras.py",
     "bounded_parameters(parameters, self.vocabulary) if", "parameters if"),
    ("tests/strategies/test_gradient_shards.py", "test_no_rank_holds_a_whole_gradient_between_microbatches",
     "lightning_rl/distributed/fsdp1.py", "no_sync() if offloads and not last", "no_sync() if not last"),
    ("tests/strategies/test_gradient_shards.py", "test_no_rank_holds_a_whole_gradient_between_microbatches",
     "lightning_rl/distributed/parallel.py", "del model, last\n        return nullcontext()",
     'getattr(model, "set_requires_gradient_sync", bool)(last)\n        return nullcontext()'),
    ("tests/generation/vllm/test_vllm_engine.py", "test_vllm_holds_the_weights_in_the_dtype_in_which_the_run_computes",
     ENGINE, "self._dtype or (torch.float32 if dtype == torch.float64 else dtype)", "self._dtype or model.dtype"),
    ("tests/policy/test_logprobs.py", "test_under_autocast_a_gpu_rounds_operands_and_neither_logits_nor_sums",
     "lightning_rl/policy/logprobs.py", 'return torch.get_autocast_dtype("cuda") if autocast else hidden.dtype',
     "return hidden.dtype"),
    ("tests/generation/weights/test_canary.py", "test_vllm_may_round_to_tf32_on_a_gpu",
     ENGINE, "return torch.cuda.is_available()", "return False"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_a_process_is_as_before_once_an_engine_was_built",
     INTERNALS, "torch.set_num_threads = set_threads\n", "pass\n"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_a_process_is_as_before_once_an_engine_was_built",
     INTERNALS, "torch.cuda.set_device(current)", "pass"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_a_gpu_that_vllm_would_not_take_is_refused_with_the_cure",
     ENGINE, "check_device(device, self._executor)\n        purpose", "purpose"),
    ("tests/policy/test_vision_models.py", "test_pictures_give_the_same_log_probabilities_packed_padded_and_alone",
     MEDIA, "found.flatten(1)[:, media.place]", "positions"),
    ("tests/policy/test_vision_models.py", "test_pictures_give_the_same_log_probabilities_packed_padded_and_alone",
     MEDIA, "found.flatten(1)[:, media.place]", "torch.arange(media.place.numel()).view(media.place.shape)"),
    ("tests/policy/test_vision_models.py", "test_pictures_give_the_same_log_probabilities_packed_padded_and_alone",
     MEDIA, "for name, values in media.types.items() if name in accepted}", "for name, values in ()}"),
    ("tests/policy/test_vision_models.py", "test_the_embedded_engine_samples_with_pictures_as_training_scores",
     "lightning_rl/generation/transformers.py", 'positions = arguments.pop("position_ids")',
     'arguments.pop("position_ids")'),
    ("tests/policy/test_vision_models.py", "test_the_embedded_engine_samples_with_pictures_as_training_scores",
     "lightning_rl/generation/transformers.py", "return logits, real, cache, last + 1",
     "return logits, real, cache, lengths"),
    ("tests/policy/test_vision_models.py", "test_the_embedded_engine_samples_with_pictures_as_training_scores",
     "lightning_rl/samples/completion.py", "0 if self.media is None else self.media.key", "0"),
    ("tests/policy/test_vision_models.py", "test_a_picture_of_a_group_is_in_the_inputs_once_only_if_it_is_the_same",
     "lightning_rl/policy/sequences.py", "alike &= with_items == with_items[first]", "alike &= with_items >= 0"),
    ("tests/policy/test_vision_models.py", "test_a_picture_of_a_group_is_in_the_inputs_once_only_if_it_is_the_same",
     "lightning_rl/rollout.py", "tuple(media.key for media in row)", "tuple(0 for media in row)"),
    ("tests/test_lost_pictures.py", "test_a_checkpoint_within_a_rollout_without_its_pictures_is_refused",
     "lightning_rl/run/run.py", "self.models.processor.check_rows(self.progress.current.rollout)", "pass"),
    ("tests/test_lost_pictures.py", "test_rows_that_lose_their_pictures_are_refused",
     "lightning_rl/run/training.py", "run.models.processor.check_rows(rollout)", "pass"),
    ("tests/test_lost_pictures.py", "test_sampled_placeholders_train_as_tokens",
     "lightning_rl/policy/processor.py", "(replies & ~rows.action_mask, ", "(replies, "),
    ("tests/test_lost_pictures.py", "test_a_request_without_the_pictures_of_its_prompt_is_refused",
     "lightning_rl/rollouts/collector.py", "for each in opened if each.request.media is None)",
     "for each in opened[:0])"),
    ("tests/audit/test_pictures_audit.py",
     "test_an_engine_that_counts_on_from_the_number_of_placeholders_is_found",
     "lightning_rl/policy/logprobs.py", 'modules_behind(model, "router_logits") else 1e-4', "model else 1e-4"),
    ("tests/samples/test_trajectory.py", "test_pictures_of_a_row_are_read_again_and_others_are_stored",
     "lightning_rl/samples/trajectory_state.py", "of_row = media is trajectory.prompt.media",
     "of_row = trajectory.prompt.media is not None"),
    ("tests/samples/test_trajectory.py", "test_pictures_of_a_row_are_read_again_and_others_are_stored",
     "lightning_rl/samples/trajectory_state.py", "if prompt.media is None or prompt.media.key != state:", "if False:"),
    ("tests/test_deterministic.py",
     "test_a_deterministic_fit_calls_nothing_that_a_gpu_refuses_and_repeats_itself_bitwise",
     "lightning_rl/generation/transformers.py", "mass = in_units(scores.exp()).cumsum_(-1)",
     "mass = in_units(scores.exp().cumsum_(-1))"),
    ("tests/test_deterministic.py",
     "test_a_deterministic_fit_calls_nothing_that_a_gpu_refuses_and_repeats_itself_bitwise",
     "lightning_rl/policy/packing.py", "inputs.new_zeros(size[0] * size[1]).index_copy(0, place, inputs)",
     "inputs.new_zeros(size[0] * size[1]).put_(place, inputs)"),
    ("tests/generation/vllm/test_vllm_engine.py",
     "test_a_share_without_room_beside_the_optimizer_is_refused_before_the_first_rollout",
     ENGINE, "if share > room.largest:", "if False:"),
    ("tests/generation/vllm/test_vllm_engine.py", "test_an_engine_sleeps_before_the_policy_scores",
     "lightning_rl/module.py", "run.sleep_engine()  # frees memory for the log-probability passes", "pass"),
]]
"""Ways in which a first run on a GPU stops or is slow, each with the test that notices without one."""
# fmt: on


class Run(NamedTuple):
    """Result of pytest in a copy of the tree."""

    code: int
    output: str

    @property
    def failed_by_assertion(self) -> bool:
        """True if tests ran and each failure is an unmet expectation or an error that a mutation brings."""
        reasons = re.findall(r"^FAILED .*? - (.*)$", self.output, re.MULTILINE)
        expected = ("assert ", "AssertionError", "Failed: DID NOT", "RuntimeError", "ValueError", "lightning_rl.")
        expected += ("Failed: rank", "torch.OutOfMemoryError")
        return self.code == 1 and bool(reasons) and all(reason.startswith(expected) for reason in reasons)


def run(tests: Sequence[str], mutation: Mutation | None = None, where: Sequence[str] = (BUGS,)) -> Run:
    """Runs the tests of some names in a copy of the tree, with a mutation if there is one.

    Runs in a separate process, which has imported only :data:`PRELOADED`.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        for name in COPIED:
            if (ROOT / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "test_mutations.py")
                shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / name, copy)
        if mutation is not None:
            apply(mutation, copy)
        sys.path.insert(0, str(copy))  # ahead of an installed library
        sys.dont_write_bytecode = True
        os.chdir(copy)
        os.environ["COLUMNS"] = "400"  # pytest cuts reasons to the width of the terminal
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = pytest.main([*where, *OPTIONS, "-k", " or ".join(tests)])
        os.chdir(ROOT)
        check_imported(copy)
        return Run(int(code), output.getvalue())


def apply(mutation: Mutation, copy: Path) -> None:
    """Edits one file.

    Raises:
        ValueError: unless the old text stands in it exactly once.
    """
    file = copy / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"expected {mutation.old!r} once in {mutation.file}, got {text.count(mutation.old)} times")
    file.write_text(text.replace(mutation.old, mutation.new))


def check_imported(copy: Path) -> None:
    """Raises a RuntimeError unless everything that was tested is that of the copy."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("lightning_rl", "support", "silent_bugs")]
    files = [Path(sys.modules[name].__file__ or "").resolve() for name in names]
    if "lightning_rl" not in names or not all(file.is_relative_to(copy) for file in files):
        raise RuntimeError(f"expected to test the library in {copy}, got {sorted(map(str, files))}")


def verdict(mutation: Mutation) -> str:
    """Return ``caught``, or the reason why a mutation was not."""
    try:
        ended = run([mutation.test], mutation, [mutation.where])
    except (OSError, RuntimeError, ValueError) as error:
        return f"NOT RUN: {error}"
    if ended.failed_by_assertion:
        return "caught"
    return "SURVIVED" if ended.code == 0 else f"CRASHED: {ended.output[-2000:]}"


def main(names: Sequence[str]) -> int:
    """Injects the mutations of some tests, or all, and prints a table."""
    every = (*MUTATIONS, *EXPORTS, *CURES)
    chosen = [mutation for mutation in every if not names or any(name in mutation.test for name in names)]
    if not chosen:
        sys.stdout.write(f"expected parts of the names of tests, got {' '.join(names)}\n")
        return 1
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    caught = 0
    with forks.Pool(2, maxtasksperchild=1) as pool:
        clean = pool.apply(run, (sorted({one.test for one in chosen}), None, sorted({one.where for one in chosen})))
        if clean.code != 0:
            sys.stdout.write(f"{clean.output}\nexpected green tests before any mutation\n")
            return 1
        for mutation, found in zip(chosen, pool.imap(verdict, chosen, chunksize=1), strict=True):
            caught += found == "caught"
            sys.stdout.write(f"{mutation.test[5:9]}  {mutation.file:40}  {mutation.new.strip()[:50]!r:54}  {found}\n")
            sys.stdout.flush()
    sys.stdout.write(f"mutations injected={len(chosen)} caught={caught}\n")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
