"""Which parameters of a call may go unread: those that say what its algorithm's name says, or that nothing looks at.

Whatever else a replay does not look up is a parameter that it does not know, and its case is not offered.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from goldens.cases import Case

Test = Callable[[Any], bool]

WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "batch_num_tokens": ("seq-mean-*", "token-sum"),
    "global_batch_size": ("token-*",),
    "chunk_size": ("*",),
    "clip_ratio_*": ("rollout_bypass_reinforce",),
    "current_version": ("m2po",),
    "default_*": ("rollout_kl_loss",),
    "delta": ("cispo", "gmpo", "sapo"),
    "dim": ("row_normalize",),
    "eps_clip*": ("off_policy_is_current_over_rollout",),
    "epsilon": ("dr_grpo", "gpg", "rloo"),
    "epsilon_*": ("sapo", "vespo"),
    "gae_lambda": ("no_eos_reward_norm",),
    "group_size": ("reward_norm*",),
    "high_precision": ("masked_normalization",),
    "layout": ("*",),
    "length_penalty": ("dr_grpo",),
    "loss_agg_mode": ("gspo", "gmpo", "sapo"),
    "loss_type": ("gmpo",),
    "max_completion_length": ("gmpo", "luspo", "vespo"),
    "micro_batch_size": ("*",),
    "multi_objective_aggregation": ("grpo*", "dr_grpo"),
    "n_samples_per_prompt": ("*",),
    "no_std_norm": ("rloo", "dr_grpo", "grpo"),
    "num_generations": ("*",),
    "num_items_in_batch": ("gmpo", "luspo"),
    "ratio_clip_*": ("reinforce", "cispo"),
    "sample_denoms": ("*",),
    "token_level_loss": ("token-*", "seq-*"),
    "use_vllm": ("ppo_clip_with_is_ratio", "vespo"),
}
"""Parameters by the patterns of algorithms in which a peer has no use for them, or whose effect is in an input."""

SAID: Mapping[str, Mapping[str, Test]] = {
    "advantage_estimator": {"*grpo": lambda v: v == "grpo", "*_baseline_rewards": lambda v: v.endswith("baseline")},
    "advantage_normalization_type": {"dr_grpo": lambda v: v == "centered", "grpo": lambda v: v == "standard"},
    "attention_mask": {"*": lambda v: v is True},
    "calculate_per_token_loss": {"*sum-token-mean": lambda v: v is False, "token-sum": lambda v: v is True},
    "disable_ppo_ratio": {"reinforce": lambda v: v is True, "*": lambda v: v is False},
    "eps": {"*": lambda v: v <= 1e-8},
    "epsilon": {"*": lambda v: v <= 1e-6},
    "f_norm": {"gpg": lambda v: v == 1.0},
    "gdpo_reward_keys": {"gdpo": lambda v: v == ["acc", "fmt"]},
    "get_mismatch_metrics": {"*": lambda v: v is False},
    "force_on_policy_ratio": {"*": lambda v: v is False},
    "gradient_accumulation_steps": {"*": lambda v: v == 1},
    "grpo_norm_by_std": {"dr_grpo": lambda v: v is False, "grpo": lambda v: v is True},
    "grpo_std_normalization": {"dr_grpo": lambda v: v is False, "*": lambda v: v is True},
    "importance_sampling_level": {"*": lambda v: v == "token"},
    "kl_coef": {"gae*": lambda v: v == 0},
    "kl_ctl": {"no_eos_reward_norm": lambda v: v == 0},
    "leave_one_out_baseline": {"group_baseline_std": lambda v: v is True},
    "log_ratio_clamp": {"kl_all_four": lambda v: v == 40.0},
    "loss_agg_mode": {"*-mean*": lambda v: v.startswith(("token", "seq")), "token-sum": lambda v: v == "token-sum"},
    "loss_fn": {"cispo": lambda v: v == "cispo", "*": lambda v: v == "dapo"},
    "loss_type": {"luspo": lambda v: v == "luspo", "vespo": lambda v: v == "vespo"},
    "num_items_in_batch": {"vespo": lambda v: v == "mask.sum()"},
    "loss_mask": {"kl_*": lambda v: v in (True, False)},  # the mask is an input where it is True
    "loss_reduction": {"*": lambda v: v.startswith(("masked sum", "prompt", "seq", "token"))},
    "mini_batch_boundaries": {"*": lambda v: v == "[(0,B//2),(B//2,B)]"},
    "multi_objective_aggregation": {"gdpo": lambda v: v == "normalize_then_sum"},
    "norm_adv_by_std_in_grpo": {"dr_grpo": lambda v: v is False, "grpo": lambda v: v is True},
    "normalize_rewards": {"dr_grpo": lambda v: v is False, "rloo": lambda v: v is False, "*": lambda v: v is True},
    "policy_loss_type": {
        "dppo*": lambda v: v == "dppo",
        "cispo*": lambda v: v == "cispo",
        "*": lambda v: (
            v in ("clip_cov", "kl_cov", "cross_entropy", "gspo", "importance_sampling", "rollout_is", "sapo")
        ),
    },
    "positive_example_nll_weight": {"*": lambda v: v == 0},
    "rl": {"three_component_loss": lambda v: v == "default"},
    "scale_rewards": {"gdpo": lambda v: v == "group", "dr_grpo": lambda v: v == "none", "grpo": lambda v: v == "group"},
    "scales": {"three_component_loss": lambda v: v.startswith("rl: count(mask & rl_weights!=0); ce: count(")},
    "sequence_level_importance_ratios": {"gspo": lambda v: v is True, "*": lambda v: v is False},
    "use_cispo": {"cispo": lambda v: v is True, "*": lambda v: v is False},
    "use_kl_in_reward": {"*": lambda v: v is False},
    "use_leave_one_out_baseline": {
        "rloo": lambda v: v is True,
        "grpo_leave_one_out": lambda v: v is True,
        "*": lambda v: v is False,
    },
    "use_on_policy_kl_approximation": {"*": lambda v: v is False},
}
"""Values that say what an algorithm's name says already; the first pattern of the name that fits decides."""

SWITCHES: Mapping[str, str] = {
    "kl_coef": "use_kl_in_reward",
    "kl_input_clamp_value": "reference_policy_kl_penalty",
    "kl_output_clamp_value": "reference_policy_kl_penalty",
    "reference_policy_kl_type": "reference_policy_kl_penalty",
    "kl_loss_coef": "use_kl_loss",
    "kl_loss_type": "use_kl_loss",
    "use_unbiased_kl": "use_kl_loss",
    "opsm_delta": "use_opsm",
    "tis_clip": "use_tis",
    "tis_clip_low": "use_tis",
    "vllm_is_correction_type": "enable_vllm_is_correction",
    "vllm_is_truncated_threshold": "enable_vllm_is_correction",
    "rollout_is_threshold": "rollout_is",
    "use_on_policy_kl_approximation": "reference_policy_kl_penalty",
}
"""Parameters that do nothing while another one is off."""


def unknown(case: Case, unread: Mapping[str, Any]) -> list[str]:
    """The parameters among the unread ones that may change what a call does."""
    return [f"{name}={value!r}" for name, value in unread.items() if not _inert(case, name, value)]


def _inert(case: Case, name: str, value: Any) -> bool:
    if value is None:  # switches nothing on
        return True
    if name in SWITCHES and not case.params.get(SWITCHES[name], True):
        return True
    for pattern, algorithms in WITHOUT_EFFECT.items():
        if fnmatch(name, pattern) and any(fnmatch(case.algorithm, one) for one in algorithms):
            return True
    said = next((test for pattern, test in SAID.get(name, {}).items() if fnmatch(case.algorithm, pattern)), None)
    return said is not None and said(value)
