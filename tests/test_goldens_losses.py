"""Replays of policy losses with parameters that no recorded call has, compared with the formula of the other system.

Each formula is written down here with plain torch and without code of lightning-rl.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from kit.calls import LENGTH, ROWS, agrees, call, inputs, kl, not_offered, options, row_mean, same
from torch import Tensor

TRL = "trl/trainer/grpo_trainer.py:GRPOTrainer._compute_loss"


def trl_loss(x: dict[str, Tensor], p: dict[str, Any], logp: Tensor) -> Tensor:
    mask, advantages = x["mask"], x["advantages"][:, None]
    gap = logp - x["old_logp"]
    ratio = gap.exp() if p["importance_sampling_level"] == "token" else row_mean(gap, mask).exp()
    if p["loss_type"] == "cispo":
        tokens = -ratio.clamp(max=p["epsilon_high"]).detach() * advantages * logp
    elif p["loss_type"] == "sapo":
        tau = torch.where(advantages > 0, p["sapo_temperature_pos"], p["sapo_temperature_neg"])
        tokens = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
    else:
        clipped = ratio.clamp(1 - p["epsilon_low"], 1 + p["epsilon_high"]) * advantages
        capped = ratio if p["delta"] is None else ratio.clamp(max=p["delta"])
        tokens = -torch.minimum(capped * advantages, clipped)
    if p["off_policy_mask_threshold"] is not None:
        drift = row_mean(x["rollout_logp"] - logp.detach(), mask)
        tokens = tokens * ((advantages >= 0) | (drift <= p["off_policy_mask_threshold"]))
    if p["use_vllm"]:
        tokens = tokens * x["importance_sampling_ratio"]
    penalty = kl("k3", logp, x["ref_logp"]) * (ratio if p["use_bias_correction_kl"] else 1.0)
    tokens, steps = tokens + p["beta"] * penalty, p["gradient_accumulation_steps"]
    total = torch.where(mask, tokens, 0.0).sum()
    if p["loss_type"] in ("grpo", "sapo"):
        return row_mean(tokens, mask).mean() / steps
    if p["loss_type"] == "bnpo":
        return total / mask.sum() / steps
    if p["loss_type"] == "dr_grpo":
        return total / (ROWS * p["max_completion_length"]) / steps
    return total / (mask.sum() if p["num_items_in_batch"] == "mask.sum()" else p["num_items_in_batch"])


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_losses(loss_type: str, level: str) -> None:
    x = inputs()
    x |= {"advantages": x.pop("adv")[:, 0], "importance_sampling_ratio": (x["old_logp"] - x["rollout_logp"]).exp()}
    common = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_low": 0.1, "epsilon_high": 1.05}
    common |= {"max_completion_length": 20, "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.3}
    if loss_type != "sapo":
        del common["sapo_temperature_pos"], common["sapo_temperature_neg"]
    for chosen in options(
        7,
        delta=(None, 1.5, 4.0),
        off_policy_mask_threshold=(None, 0.01),
        beta=(0.0, 0.1),
        use_bias_correction_kl=(False, True),
        use_vllm=(False, True),
        gradient_accumulation_steps=(1, 4),
        num_items_in_batch=("mask.sum()", 40),
    ):
        params = common | chosen
        agrees(call(TRL, "trl", "policy_loss", params, x), lambda logp, p=params: trl_loss(x, p, logp))


def test_trls_luspo_weighs_rows_by_their_length() -> None:
    x = inputs()
    x |= {"advantages": x.pop("adv")[:, 0]}
    params = {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1}
    params |= {"delta": 1.4, "gradient_accumulation_steps": 2, "beta": 0.0}

    def formula(logp: Tensor) -> Tensor:
        ratio, advantages = row_mean(logp - x["old_logp"], x["mask"]).exp(), x["advantages"][:, None]
        rows = -torch.minimum(ratio.clamp(max=1.4) * advantages, ratio.clamp(0.9, 1.1) * advantages)
        return (rows * x["mask"].sum(-1, keepdim=True)).mean() / 2

    agrees(call(TRL, "trl", "policy_loss", params, x), formula)
    assert not_offered(call(TRL, "trl", "policy_loss", params | {"beta": 0.1}, x)) == "beta=0.1"
    token = params | {"importance_sampling_level": "token"}
    assert not_offered(call(TRL, "trl", "policy_loss", token, x)) == "importance_sampling_level='token'"


NEMO = "nemo_rl/algorithms/loss/loss_functions.py:ClippedPGLossFn.__call__"


def nemo_loss(x: dict[str, Tensor], p: dict[str, Any], logp: Tensor) -> Tensor:
    advantages, kept = x["adv"], x["sample_mask"]
    mask = x["mask"] & kept[:, None]
    old = logp.detach() if p["force_on_policy_ratio"] else x["old_logp"]
    gap, by_row = logp - old, p["sequence_level_importance_ratios"]
    if p["disable_ppo_ratio"] and not p["force_on_policy_ratio"]:
        ratio = clipped = logp
    else:
        ratio = row_mean(gap, x["mask"]).exp().expand_as(gap) if by_row else gap.exp()
        clipped = ratio.clamp(1 - p["ratio_clip_min"], 1 + p["ratio_clip_max"])
    tokens = torch.maximum(-advantages * ratio, -advantages * clipped)
    if p["use_cispo"]:
        tokens = -advantages * clipped.detach() * logp
    if p["ratio_clip_c"] is not None:
        tokens = torch.where(advantages < 0, torch.minimum(tokens, -advantages * p["ratio_clip_c"]), tokens)
    gap = (old - x["rollout_logp"]).detach()
    weight = torch.where(mask, gap, 0.0).sum(-1, keepdim=True).exp() if by_row else gap.exp()
    low, high = p["truncated_importance_sampling_ratio_min"], p["truncated_importance_sampling_ratio"]
    if p["truncated_importance_sampling_type"] == "tis":
        weight = weight.clamp(low or 0.0, high)
    if p["truncated_importance_sampling_type"] == "icepop":
        weight = weight * ((weight >= low) & (weight <= high))
    if p["truncated_importance_sampling_type"] == "seq-mask-tis":
        mean = row_mean(gap, x["mask"]).exp()
        weight = weight * ((mean >= low) & (mean <= high))
    tokens = tokens * (weight if p["use_importance_sampling_correction"] else 1.0)
    if not p["use_kl_in_reward"]:
        source = x["rollout_logp"] if p["use_on_policy_kl_approximation"] else logp.detach()
        gap, bound = logp - x["ref_logp"], p["kl_input_clamp_value"] or math.inf
        penalty = (logp - source).exp() * kl(p["reference_policy_kl_type"], gap.clamp(-bound, bound), 0 * gap)
        bound = p["kl_output_clamp_value"] or math.inf
        tokens = tokens + p["reference_policy_kl_penalty"] * penalty.clamp(-bound, bound)
    loss = tokens[mask].mean() if p["token_level_loss"] else row_mean(tokens, x["mask"])[kept].mean()
    correct = mask & (x["rewards"] > 0)[:, None]
    return loss + p["positive_example_nll_weight"] * -logp[correct].mean()


NEMO_PLAIN: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.1,
    "ratio_clip_max": 0.3,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.1,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
SEQUENCE = {"sequence_level_importance_ratios": True, "token_level_loss": False}
TRUNCATED = {"truncated_importance_sampling_ratio": 1.1, "truncated_importance_sampling_ratio_min": 0.9}


@pytest.mark.parametrize(
    "chosen",
    [
        *options(reference_policy_kl_type=("k1", "k2", "k3"), token_level_loss=(True, False)),
        *options(use_on_policy_kl_approximation=(True,), reference_policy_kl_type=("k1", "k2", "k3")),
        *(SEQUENCE | one for one in options(reference_policy_kl_type=("k1", "k2", "k3"), ratio_clip_c=(None, 1.2))),
        *options(kl_input_clamp_value=(None, 0.2), kl_output_clamp_value=(None, 0.05)),
        *options(force_on_policy_ratio=(True,), ratio_clip_c=(None, 3.0), disable_ppo_ratio=(False, True)),
        *options(disable_ppo_ratio=(True,), token_level_loss=(True, False), use_kl_in_reward=(True, False)),
        *options(use_cispo=(True,), positive_example_nll_weight=(0.0, 0.3)),
        *(
            {
                "use_importance_sampling_correction": True,
                **TRUNCATED,
                **level,
                "truncated_importance_sampling_type": kind,
            }
            for kind in ("tis", "icepop")
            for level in ({}, SEQUENCE, {"disable_ppo_ratio": True}, {"use_cispo": True})
        ),
        {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "seq-mask-tis", **TRUNCATED},
        {"use_importance_sampling_correction": True, **SEQUENCE},
        {"use_importance_sampling_correction": True, "force_on_policy_ratio": True},
    ],
    ids=str,
)
def test_nemo_losses(chosen: dict[str, Any]) -> None:
    x, params = inputs(), NEMO_PLAIN | chosen
    x |= {"sample_mask": torch.tensor([1, 1, 1, 0, 1, 1]).bool(), "rewards": torch.tensor([1.0, 0, 1, 1, 0, 1])}
    agrees(call(NEMO, "NeMo-RL", "policy_loss", params, x), lambda logp: nemo_loss(x, params, logp))


AREAL = "areal/utils/functional/functional.py:ppo_actor_loss_fn"


def areal_outputs(x: dict[str, Tensor], p: dict[str, Any], logp: Tensor) -> dict[str, Tensor]:
    mask, advantages, chosen = x["mask"], x["adv"], p["rejection_sampling"]
    gap, low, high = x["old_logp"] - x["rollout_logp"], chosen.get("lower"), chosen["upper"]
    both = [binary_kl(x[a], x[b]) for a, b in (("old_logp", "rollout_logp"), ("rollout_logp", "old_logp"))]
    metrics = {"ratio": gap, "binary_kl": torch.maximum(*both)}
    metrics |= {f"kl_{name}": kl(name, x["old_logp"], x["rollout_logp"]) for name in ("k1", "k2", "k3")}
    metric, weight = metrics[chosen["metric"]], gap.exp()
    if chosen["level"] == "sequence":
        sums = torch.where(mask, metric, 0.0).sum(-1, keepdim=True)
        most = metric.masked_fill(~mask, -math.inf).amax(-1, keepdim=True)
        most = torch.where(mask.any(-1, keepdim=True), most, 0.0)
        metric = {"sum": sums, "mean": row_mean(metric, mask), "max": most}[chosen["agg"]]
        weight = (row_mean(gap, mask).exp() if chosen["metric"] == "ratio" else weight).expand_as(gap)
    metric = metric.exp() if chosen["metric"] == "ratio" else metric
    kept = (metric <= high) & (metric >= (-math.inf if low is None else low))
    counted, changed = mask & kept, ~kept
    if chosen["action"] == "clamp":
        counted, bounded = mask, weight.clamp(low or 0.0, high)
        bounded = torch.where(kept, weight, bounded) if chosen["level"] == "sequence" else bounded
        weight, changed = bounded, bounded != weight
    gap = logp - x["old_logp"]
    ratio = gap.exp()
    if p["importance_sampling_level"] == "sequence":
        ratio, advantages = (
            torch.where(counted, one, 0.0) for one in (row_mean(gap, counted).exp(), row_mean(advantages, counted))
        )
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - p["eps_clip"], 1 + p["eps_clip_higher"])
    tokens, cap = torch.maximum(plain, clipped), math.inf if p["c_clip"] is None else p["c_clip"]
    most = torch.where(advantages == 0, math.inf, advantages.abs() * cap)
    weight = torch.where(counted, weight, 0.0)
    weighed = torch.where(counted, torch.minimum(tokens, most) * weight, 0.0)
    return {
        "loss": weighed.sum() / mask.sum(),
        "per_token_loss": weighed,
        "clip_mask": (plain < clipped) & mask,
        "dual_clip_mask": (tokens > most) & mask,
        "behave_imp_weight": weight,
        "behave_mask": counted & (weight > 0),
        "filtered_fraction": (changed & mask).sum() / mask.sum(),
    }


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


AREAL_BOUNDS = {"ratio": (0.9, 1.15), "kl_k1": (-0.1, 0.12), "kl_k2": (0.002, 0.02), "kl_k3": (0.002, 0.02)}
AREAL_BOUNDS |= {"binary_kl": (0.001, 0.01)}


@pytest.mark.parametrize("metric", AREAL_BOUNDS)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_areals_rejection_sampling(metric: str, level: str) -> None:
    x = inputs()
    x["old_logp"], x["rollout_logp"] = x["old_logp"].clamp(max=-0.01), x["rollout_logp"].clamp(max=-0.01)
    common = {"eps_clip": 0.1, "eps_clip_higher": 0.3}
    low, high = AREAL_BOUNDS[metric]
    for chosen in options(
        5,
        action=("mask", "clamp"),
        agg=("sum", "mean", "max"),
        lower=(None, low),
        upper=(high, 5 * high, 0.9 * high),
        importance_sampling_level=("token", "sequence"),
        c_clip=(None, 1.1),
    ):
        outer = {name: chosen.pop(name) for name in ("importance_sampling_level", "c_clip")}
        params = common | outer | {"rejection_sampling": {"level": level, "metric": metric, **chosen}}
        wanted = areal_outputs(x, params, x["logp"].clone().requires_grad_())
        case = call(AREAL, "AReaL", "off_policy", params, x, outputs="per_token_loss")
        found = agrees(case, lambda logp, p=params: areal_outputs(x, p, logp)["loss"])
        for name, value in wanted.items():
            where = x["mask"] if value.dim() else torch.ones((), dtype=torch.bool)
            same(found[name][where], value[where])


OPENRLHF = "openrlhf/models/loss.py:PolicyLoss.forward"


def openrlhf_loss(x: dict[str, Tensor], p: dict[str, Any], logp: Tensor) -> Tensor:
    mask, advantages, gspo = x["mask"], x["adv"], p["policy_loss_type"] == "gspo"
    corrected, (low, high) = p["enable_vllm_is_correction"], p["vllm_is_truncated_threshold"]
    gap = logp - (x["rollout_logp"] if gspo and corrected else x["old_logp"])
    ratio = row_mean(gap, mask).exp() if gspo else gap.exp()
    tokens = -torch.minimum(ratio * advantages, ratio.clamp(1 - p["clip_eps_low"], 1 + p["clip_eps_high"]) * advantages)
    if p["dual_clip"] is not None:
        tokens = torch.where(advantages < 0, torch.minimum(tokens, -p["dual_clip"] * advantages), tokens)
    if corrected and not gspo:
        gap = x["old_logp"] - x["rollout_logp"]
        weight, mean = gap.exp(), row_mean(gap, mask).exp()
        inside = {"icepop": weight, "seq-mask-tis": mean}.get(p["vllm_is_correction_type"])
        kept = 1.0 if inside is None else (inside >= low) & (inside <= high)
        tokens = tokens * (weight.clamp(low, high) if inside is None else weight * kept)
    by_rows, ranks = gspo or not p["token_level_loss"], p["dp_size"]
    if by_rows and p["global_batch_size"] is None:
        return row_mean(tokens, mask)[mask.any(-1)].mean()
    if by_rows:
        return row_mean(tokens, mask).sum() / p["global_batch_size"] * ranks
    if p["batch_num_tokens"] is None:
        return tokens[mask].mean()
    return tokens[mask].sum() / p["batch_num_tokens"] * ranks


@pytest.mark.parametrize("kind", ["ppo", "gspo"])
@pytest.mark.parametrize("correction", ["tis", "icepop", "seq-mask-tis"])
def test_openrlhf_losses(kind: str, correction: str) -> None:
    x = inputs()
    common = {"policy_loss_type": kind, "vllm_is_correction_type": correction, "clip_eps_low": 0.1}
    common |= {"vllm_is_truncated_threshold": [0.95, 1.1], "clip_eps_high": 0.2}
    for chosen in options(
        3,
        enable_vllm_is_correction=(False, True),
        dual_clip=(None, 1.2),
        token_level_loss=(True, False),
        batch_num_tokens=(None, 50.0),
        global_batch_size=(None, 9.0),
        dp_size=(1, 2),
    ):
        params = common | chosen
        case = call(OPENRLHF, "OpenRLHF", "policy_loss", params, x, outputs="clip_ratio")
        found = agrees(case, lambda logp, p=params: openrlhf_loss(x, p, logp))
        anchor = x["rollout_logp" if kind == "gspo" and params["enable_vllm_is_correction"] else "old_logp"]
        gap, mask = x["logp"] - anchor, x["mask"]
        ratio = (row_mean(gap, mask) if kind == "gspo" else gap).exp()
        clipped = ratio.clamp(0.9, 1.2) * x["adv"] < ratio * x["adv"]
        same(found["clip_ratio"], clipped[mask].double().mean())
        same(found["ppo_kl"], (x["old_logp"] - x["logp"])[mask].mean())


VERL = "verl/trainer/ppo/core_algos.py:"


def verl_mean(tokens: Tensor, mask: Tensor, p: dict[str, Any]) -> Tensor:
    rows, ranks = mask.any(-1), p.get("dp_size") or 1
    sums, lengths = torch.where(mask, tokens, 0.0).sum(-1), mask.sum(-1).clamp(min=1)
    if p["loss_agg_mode"] == "token-sum":
        return sums.sum() * ranks
    if p["loss_agg_mode"] == "token-mean":
        return sums.sum() / (p.get("batch_num_tokens") or mask.sum()) * ranks
    if p["loss_agg_mode"] == "seq-mean-token-mean":
        sums = sums / lengths
    if p["loss_agg_mode"] == "seq-mean-token-sum-norm":
        sums = sums / (p.get("loss_scale_factor") or mask.shape[1])
    return sums.sum() / (p.get("global_batch_size") or rows.sum()) * ranks


VERL_MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def verl_tokens(function: str, x: dict[str, Tensor], p: dict[str, Any], logp: Tensor) -> Tensor:
    ratio, advantages = (logp - x["old_logp"]).exp(), x["adv"]
    clipped = ratio.clamp(1 - p.get("clip_ratio_low", 0.0), 1 + p.get("clip_ratio_high", 0.0))
    shift = logp.detach().exp() - x["old_logp"].exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)
    return {
        "compute_policy_loss_vanilla": lambda: torch.where(
            advantages < 0, torch.minimum(surrogate, -advantages * p.get("clip_ratio_c", 3.0)), surrogate
        ),
        "compute_policy_loss_cispo": lambda: -clipped.detach() * advantages * logp,
        "compute_policy_loss_reinforce": lambda: -advantages * logp,
        "compute_policy_loss_dppo_tv": lambda: (
            -advantages
            * ratio.detach().clamp(max=p["ratio_cap"])
            * logp
            * torch.where(advantages > 0, shift <= p["delta_high"], shift >= -p["delta_low"])
        ),
    }[function]()


@pytest.mark.parametrize("mode", VERL_MODES)
@pytest.mark.parametrize(
    ("function", "params"),
    [
        ("compute_policy_loss_vanilla", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
        ("compute_policy_loss_vanilla", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.2}),
        ("compute_policy_loss_cispo", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}),
        ("compute_policy_loss_reinforce", {}),
        ("compute_policy_loss_dppo_tv", {"delta_low": 0.05, "delta_high": 0.1, "ratio_cap": 1.1}),
    ],
    ids=str,
)
def test_verl_losses(function: str, params: dict[str, Any], mode: str) -> None:
    x = inputs()
    weights = (x["old_logp"] - x.pop("rollout_logp")).exp()
    counts = options(
        dp_size=(1, 4), batch_num_tokens=(None, 60), global_batch_size=(None, 11), loss_scale_factor=(None, 30)
    )
    for counted, weighted in product(counts, (False, True)):
        p = params | counted | {"loss_agg_mode": mode}
        if mode != "token-sum" and p["dp_size"] > 1 and None in (p["batch_num_tokens"], p["global_batch_size"]):
            continue  # verl refuses ranks without their counts
        arrays = x | ({"rollout_is_weights": weights} if weighted else {})
        case = call(VERL + function, "verl", "policy_loss", p, arrays, outputs="pg_clipfrac")
        scale = weights if weighted else 1.0
        found = agrees(case, lambda logp, p=p, w=scale: verl_mean(verl_tokens(function, x, p, logp) * w, x["mask"], p))
        same(found["ppo_kl"], (x["old_logp"] - x["logp"])[x["mask"]].mean())
        if function == "compute_policy_loss_vanilla":
            ratio, advantages = (x["logp"] - x["old_logp"]).exp(), x["adv"]
            plain, clipped = -advantages * ratio, -advantages * ratio.clamp(0.9, 1.3)
            same(found["pg_clipfrac"], (clipped > plain)[x["mask"]].double().mean())
            beyond = (torch.maximum(plain, clipped) > -advantages * p.get("clip_ratio_c", 3.0)) & (advantages < 0)
            same(found["pg_clipfrac_lower"], beyond[x["mask"]].double().mean())


@pytest.mark.parametrize("chosen", list(options(kl_estimator=(0, 1, 2, 3), loss_fn=("dapo", "cispo"))), ids=str)
def test_open_instruct_losses(chosen: dict[str, Any]) -> None:
    x, function = inputs(), "open_instruct/grpo_utils.py:compute_grpo_loss"
    params = chosen | {"beta": 0.1, "clip_lower": 0.1, "clip_higher": 0.2}

    def formula(logp: Tensor) -> Tensor:
        ratio, advantages = (logp - x["old_logp"]).exp(), x["adv"]
        if chosen["loss_fn"] == "cispo":
            tokens = -ratio.clamp(max=1.2).detach() * advantages * logp
        else:
            tokens = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.2))
        names = ("k1", "k2", "k3", "k1")
        penalty = kl(names[chosen["kl_estimator"]], logp, x["ref_logp"])
        penalty = penalty * ratio if chosen["kl_estimator"] == 3 else penalty
        return (tokens + 0.1 * penalty)[x["mask"]].mean()

    agrees(call(function, "open-instruct", "policy_loss", params, x), formula)


SKYRL = "skyrl/backends/skyrl_train/utils/ppo_utils.py:"


@pytest.mark.parametrize(
    ("function", "kind"),
    [("ppo_policy_loss", "regular"), ("ppo_policy_loss", "dual_clip"), ("sapo_policy_loss", "sapo")],
)
@pytest.mark.parametrize("tis", [None, "token", "sequence"])
@pytest.mark.parametrize(
    "masks", list(options(outlier=(None, 1.6), token=(None, 1.3), sequence=(None, "geo", "product")))
)
def test_skyrl_losses(function: str, kind: str, tis: str | None, masks: dict[str, Any]) -> None:
    x, names = inputs(), {"geo": "geometric", "product": "product", None: None}
    nested = {"tis_ratio_type": tis, "token_tis_ratio_clip_high": 1.2, "sequence_tis_ratio_clip_high": 1.3}
    nested |= {"sequence_mask_metric": names[masks["sequence"]], "outlier_token_is_threshold_high": masks["outlier"]}
    bounds = {"geo": (0.95, 1.1), "product": (0.6, 1.4)}
    nested |= {
        f"{name}_mask_{end}": bound
        for name, band in bounds.items()
        for end, bound in zip(("low", "high"), band, strict=True)
    }
    if masks["token"]:
        nested |= {"token_mask_is_threshold_low": 1 / 1.3, "token_mask_is_threshold_high": 1.3}
    params = {"policy_loss_type": kind, "eps_clip_low": 0.1, "eps_clip_high": 0.3, "clip_ratio_c": 1.5}
    params |= {"tau_pos": 0.9, "tau_neg": 1.2, "off_policy_correction": nested}
    for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c") if kind == "sapo" else ("tau_pos", "tau_neg"):
        del params[name]
    mask, gap = x["mask"], x["old_logp"] - x["rollout_logp"]
    if masks["outlier"]:
        mask = mask & ((gap.exp() <= 1.6) | ~mask).all(-1, keepdim=True)
    if masks["token"]:
        mask = mask & (gap.exp() <= 1.3) & (gap.exp() >= 1 / 1.3)
    sums = torch.where(mask, gap, 0.0).sum(-1, keepdim=True)
    weight = {None: torch.ones(()), "token": gap.exp().clamp(max=1.2), "sequence": sums.exp().clamp(max=1.3)}[tis]
    if masks["sequence"]:
        statistic = {"geo": row_mean(gap, mask), "product": sums}[masks["sequence"]].exp()
        low, high = bounds[masks["sequence"]]
        mask = mask & (statistic >= low) & (statistic <= high)

    def formula(logp: Tensor) -> Tensor:
        ratio, advantages = (logp - x["old_logp"]).exp(), x["adv"]
        tokens = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.9, 1.3))
        if kind == "dual_clip":
            tokens = torch.where(advantages < 0, torch.minimum(tokens, -1.5 * advantages), tokens)
        if kind == "sapo":
            tau = torch.where(advantages > 0, 0.9, 1.2)
            tokens = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages
        return torch.where(mask, tokens * weight, 0.0).sum()

    agrees(call(SKYRL + function, "SkyRL", "off_policy", params, x), formula)


@pytest.mark.parametrize("kind", ["default", "ipo"])
def test_prime_rls_whole_loss(kind: str) -> None:
    x = inputs()
    x |= {
        f"{name}_weights": (torch.arange(ROWS * LENGTH).view(ROWS, -1) % 3 == k) * (k + 1.0)
        for k, name in enumerate(("rl", "ce", "ref_kl"))
    }
    params = {"rl": kind, "adv_tau": 1.5, "kl_tau": 0.01, "dppo_mask_low": 0.1, "scales": "per component"}
    params |= {"ipo_threshold": 0.1} if kind == "ipo" else {"dppo_mask_high": 0.2}

    def formula(logp: Tensor) -> Tensor:
        gap = logp - x["rollout_logp"]
        shift, advantages = (logp.exp() - x["rollout_logp"].exp()).detach(), 1.5 * x["adv"]
        outside = torch.where(advantages > 0, shift > 0.2, shift < -0.1) if kind == "default" else shift.abs() > 0.1
        pull = (x["ref_logp"] - logp).detach()
        parts = {
            "rl": torch.where(outside, 0.0, -advantages * gap.exp()) + 0.01 * gap.square(),
            "ce": -logp,
            "ref_kl": torch.where(shift < -0.1, 0.0, -pull * gap.exp()) + 0.01 * gap.square(),
        }
        loss = torch.zeros((), dtype=torch.float64)
        for name, tokens in parts.items():
            weight = x[f"{name}_weights"]
            chosen = (weight != 0) & (x["mask"] if name == "rl" else True)
            loss = loss + (tokens * weight)[chosen].sum() / chosen.sum()
        return loss

    agrees(call("src/prime_rl/trainer/rl/loss.py:compute_loss", "prime-rl", "policy_loss", params, x), formula)
