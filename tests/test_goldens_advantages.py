"""Replays of everything but policy losses with parameters that no recorded call has, compared with a formula.

Advantages, normalization, KL estimators, reductions, weights and whole pipelines of other systems. Each formula is
written down here with plain torch and without code of lightning-rl.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from goldens.cases import Field
from goldens.rules import RULES, reduction_weights
from goldens.verdict import Status, verdict
from kit.calls import LENGTH, ROWS, call, inputs, kl, not_offered, options, replayed, row_mean, same
from torch import Tensor

GROUPS = torch.tensor([0, 0, 1, 1, 1, 0])


def rewards(seed: int = 1, *shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS,)), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_group(values: Tensor, groups: Tensor = GROUPS) -> list[Tensor]:
    """Return the values of each row's group."""
    return [values[groups == group] for group in groups]


def standardised(values: Tensor, epsilon: float, *, scaled: bool = True) -> Tensor:
    members = by_group(values)
    means, stds = (torch.stack([getattr(one, name)() for one in members]) for name in ("mean", "std"))
    return (values - means) / (stds + epsilon) if scaled else values - means


def whitened(values: Tensor, mask: Tensor, *, unbiased: bool) -> Tensor:
    return (values - values[mask].mean()) / values[mask].std(correction=int(unbiased))


# advantages of rows


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("weights", [None, [0.3, 2.0]])
def test_verls_gdpo(scaled: bool, weights: list[float] | None) -> None:
    x = {"reward_b": rewards(1), "reward_a": rewards(2), "group": GROUPS}
    mask = inputs()["mask"]
    params = {"gdpo_reward_keys": ["b", "a"], "gdpo_reward_weights": weights, "epsilon": 1e-3, "prompt_length": 2}
    params |= {"norm_adv_by_std_in_grpo": scaled}
    x |= {"attention_mask": torch.cat([torch.ones(ROWS, 2, dtype=torch.bool), mask], -1)}
    parts = [
        weight * standardised(x[f"reward_{key}"], 1e-3, scaled=scaled)
        for key, weight in zip("ba", weights or [1.0, 1.0], strict=True)
    ]
    wanted = whitened(torch.stack(parts).sum(0)[:, None].expand(mask.shape), mask, unbiased=True)
    found = replayed(call("core_algos.py:compute_gdpo_outcome_advantage", "verl", "advantages_outcome", params, x))
    same(found["advantages"][mask], wanted[mask])


def nemo_rows(values: Tensor, *, leave_one_out: bool, scaled: bool) -> Tensor:
    found = torch.zeros_like(values)
    for row in range(len(values)):
        others = GROUPS[row] == GROUPS
        others[row] = not leave_one_out
        deviation = values[others].std() if others.sum() > 1 else torch.zeros(())
        found[row] = values[row] - values[others].mean()
        found[row] /= (deviation + 1e-6) if scaled and deviation > 0 else 1.0
    return found


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_nemos_group_advantages(leave_one_out: bool, scaled: bool) -> None:
    params = {"use_leave_one_out_baseline": leave_one_out, "normalize_rewards": scaled}
    x = {"rewards": rewards(1), "group": GROUPS, "mask": torch.ones(ROWS, 1, dtype=torch.bool)}
    grpo = call("GRPOAdvantageEstimator.compute_advantage", "NeMo-RL", "advantages_outcome", params, x)
    same(replayed(grpo)["advantages"][:, 0], nemo_rows(x["rewards"], leave_one_out=leave_one_out, scaled=scaled))
    for weights in (None, [0.25, 1.5]):
        parts = {"reward_fmt": rewards(2), "reward_acc": rewards(3)}
        params |= {"reward_weights": weights}
        gdpo = call("GDPOAdvantageEstimator.compute_advantage", "NeMo-RL", "advantages_outcome", params, x | parts)
        rows = [nemo_rows(parts[name], leave_one_out=leave_one_out, scaled=scaled) for name in sorted(parts)]
        total = torch.stack([weight * row for weight, row in zip(weights or [1.0, 1.0], rows, strict=True)]).sum(0)
        same(replayed(gdpo)["advantages"], (total - total.mean()) / total.std())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_trls_group_advantages(scale: str, aggregation: str) -> None:
    parts = rewards(4, ROWS, 2)
    params = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "reward_weights": [0.5, 2.0]}
    x = {"rewards_per_func": parts, "group": GROUPS}
    found = replayed(call("grpo_trainer.py:GRPOTrainer._generate_and_score", "trl", "advantages_outcome", params, x))
    if aggregation == "normalize_then_sum":
        total = 0.5 * standardised(parts[:, 0], 1e-4) + 2.0 * standardised(parts[:, 1], 1e-4)
        wanted = (total - total.mean()) / (total.std() + 1e-4)
    else:
        total = parts @ torch.tensor([0.5, 2.0], dtype=torch.float64)
        wanted = standardised(total, 1e-4, scaled=scale == "group")
        wanted = wanted / (total.std() + 1e-4) if scale == "batch" else wanted
    same(found["advantages"], wanted)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "ppo"])
def test_slimes_rewards(name: str) -> None:
    x = {"rewards": rewards(1), "group": GROUPS}
    for scaled, normal in ((True, True), (False, True), (True, False)):
        params = {"advantage_estimator": name, "grpo_std_normalization": scaled, "rewards_normalization": normal}
        found = replayed(call("rollout.py:_post_process_rewards", "slime", "advantages_outcome", params, x))
        centred = standardised(x["rewards"], 1e-6, scaled=scaled and name in ("grpo", "gspo", "cispo"))
        same(found["scores"], centred if normal and name != "ppo" else x["rewards"])


def test_verls_gpg_divides_by_a_constant() -> None:
    x = {"token_rewards": torch.zeros(ROWS, LENGTH, dtype=torch.float64), "mask": inputs()["mask"], "group": GROUPS}
    x["token_rewards"][:, 2] = rewards(1) * torch.tensor([1, 0, 1, 1, 1, 1])
    scores = x["token_rewards"].sum(-1)
    found = replayed(call("compute_gpg_outcome_advantage", "verl", "advantages_outcome", {"f_norm": 2.5}, x))
    wanted = ROWS / 5 * standardised(scores, 0.0, scaled=False) / 2.5
    same(found["advantages"], wanted[:, None] * x["mask"])


# advantages of tokens


def to_go(values: Tensor, gamma: float) -> Tensor:
    found, running = torch.zeros_like(values), torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        running = values[:, step] + gamma * running
        found[:, step] = running
    return found


OPENRLHF_ROWS = {
    "gae": lambda r: r,
    "reinforce": lambda r: r,
    "reinforce_baseline": lambda r: standardised(r, 0.0, scaled=False),
    "dr_grpo": lambda r: standardised(r, 0.0, scaled=False),
    "group_norm": lambda r: standardised(r, 1e-9),
    "rloo": lambda r: torch.stack([(len(g) * s - g.sum()) / (len(g) - 1) for s, g in zip(r, by_group(r), strict=True)]),
}


@pytest.mark.parametrize("name", OPENRLHF_ROWS)
def test_openrlhfs_estimators(name: str) -> None:
    x = inputs()
    mask = x["mask"] | torch.eye(ROWS, LENGTH, dtype=torch.bool)  # no empty row
    arrays = {"mask": mask, "rewards": rewards(1), "group": GROUPS, "kl": kl("k1", x["logp"], x["ref_logp"])}
    arrays |= {"values": x["adv"]}
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    function = "experience_maker.py:RemoteExperienceMaker.compute_advantages_and_returns"
    for chosen in options(no_std_norm=(True, False), kl_coef=(0.0, 0.1, -0.1), reward_clip_range=(None, [-0.4, 0.5])):
        params = chosen | {"estimator": name, "gamma": 0.9, "lambd": 0.8, "n_samples_per_prompt": 3}
        found = replayed(call(function, "OpenRLHF", "advantages_token", params, arrays))
        scores = OPENRLHF_ROWS[name](arrays["rewards"]).clamp(*(chosen["reward_clip_range"] or (-math.inf, math.inf)))
        tokens = (last * scores[:, None] - max(chosen["kl_coef"], 0.0) * arrays["kl"]) * mask
        if name == "gae":
            values = arrays["values"] * mask
            following = torch.cat([values[:, 1:], values[:, :1] * 0], -1)
            wanted = to_go(tokens + 0.9 * following - values, 0.9 * 0.8)
            same(found["returns"], wanted + values)
        else:
            wanted = to_go(tokens, 0.9 if name == "reinforce" else 1.0)
            same(found["returns"], wanted)
        if name in ("gae", "reinforce", "reinforce_baseline"):
            centred = wanted - wanted[mask].mean()
            wanted = centred if chosen["no_std_norm"] else centred / wanted[mask].std(correction=0)
        same(found["advantages"][mask], wanted[mask])


@pytest.mark.parametrize("name", ["grpo", "gspo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("normal", [True, False])
@pytest.mark.parametrize("coefficient", [0.0, 0.2])
def test_slimes_estimators(name: str, normal: bool, coefficient: float) -> None:
    x = inputs()
    mask = x["mask"] | torch.eye(ROWS, LENGTH, dtype=torch.bool)
    arrays = {name: x[name] for name in ("old_logp", "ref_logp")} | {"mask": mask, "rewards": rewards(1)}
    arrays |= {"lengths": torch.full((ROWS,), LENGTH)}
    params = {"advantage_estimator": name, "normalize_advantages": normal, "kl_coef": coefficient, "kl_loss_type": "k2"}
    params |= {"gamma": 0.9} if name == "reinforce_plus_plus" else {}
    case = call("loss.py:compute_advantages_and_returns", "slime", "advantages_token", params, arrays)
    found, penalty = replayed(case), -coefficient * kl("k2", x["old_logp"], x["ref_logp"])
    wanted = arrays["rewards"][:, None].expand(ROWS, LENGTH)
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    if name == "reinforce_plus_plus_baseline":
        wanted = wanted + penalty
    if name == "reinforce_plus_plus":
        wanted = to_go(penalty * mask + last * wanted, 0.9)
    same(found["advantages"][mask], (whitened(wanted, mask, unbiased=True) if normal else wanted)[mask])


# normalization


def areal_normalised(x: Tensor, mask: Tensor, sizes: list[int], p: dict[str, Any]) -> Tensor:
    """AReaL's ``Normalization``: the deviation is taken around the subtracted mean."""
    parts = {
        "batch": [slice(0, len(x))],
        "group": [slice(sum(sizes[:k]), sum(sizes[: k + 1])) for k in range(len(sizes))],
    }
    centred, found = x.clone(), torch.zeros_like(x)
    for rows in parts.get(p["mean_level"], []):
        own, kept = x[rows], mask[rows]
        total, number = (own * kept).sum(), kept.sum()
        mean = (total - own) / (number - 1) if p["mean_leave1out"] and number > 1 else total / number
        alone = p["mean_leave1out"] and number <= 1
        one_row = alone and p["mean_level"] == "group" and rows.stop - rows.start == 1
        centred[rows] = own - (own if one_row else 0.0 if alone else mean)
    if p["std_level"] is None:
        return centred * mask
    for rows in parts[p["std_level"]]:
        kept, number = mask[rows], mask[rows].sum()
        divisor = number - int(p["std_unbiased"])
        std = ((centred[rows] * kept).square().sum() / divisor).sqrt() if divisor > 0 else torch.ones(())
        found[rows] = centred[rows] * kept / (std + p["eps"])
    return found


LEVELS = [("batch", "batch"), ("batch", None), ("group", "group"), ("group", None), ("group", "batch"), (None, None)]
NORM = "areal/utils/data.py:Normalization.__call__"


@pytest.mark.parametrize(("mean", "std"), LEVELS)
@pytest.mark.parametrize("masked", [True, False])
def test_areals_normalization(mean: str | None, std: str | None, masked: bool) -> None:
    values, mask = rewards(1, 9), torch.tensor([1, 1, 1, 1, 0, 1, 1, 1, 1]).bool() | (not masked)
    tokens, valid = rewards(2, ROWS, LENGTH), inputs()["mask"]
    for chosen in options(mean_leave1out=(False, True), std_unbiased=(True, False), sizes=(None, [2, 4, 3])):
        sizes = chosen.pop("sizes")
        params = {"mean_level": mean, "std_level": std, "eps": 1e-3, "group_size": 3, "group_sizes": sizes} | chosen
        x = {"x": values} | ({"loss_mask": mask} if masked else {})
        found = replayed(call(NORM, "AReaL", "normalization", params, x))["y"]
        same(found[mask], areal_normalised(values, mask, sizes or [3, 3, 3], params)[mask])
        params |= {"group_size": 2, "group_sizes": None}
        found = replayed(call(NORM, "AReaL", "normalization", params, {"x": tokens, "mask": valid}))["y"]
        same(found[valid], areal_normalised(tokens, valid, [2, 2, 2], params)[valid])


@pytest.mark.parametrize(("mean", "std"), [(None, "batch"), (None, "group"), ("batch", "group")])
@pytest.mark.parametrize("sizes", [[3, 3, 3], [1, 3, 4, 1]])
def test_a_deviation_around_another_mean_differs_by_a_rule(mean: str | None, std: str, sizes: list[int]) -> None:
    for chosen in options(mean_leave1out=(False, True), std_unbiased=(True, False)):
        params = {"mean_level": mean, "std_level": std, "eps": 1e-3, "group_size": 3, "group_sizes": sizes} | chosen
        values = rewards(1, 9)
        theirs = areal_normalised(values, torch.ones(9), sizes, params)
        field = Field(value=theirs.numpy(), rtol=1e-4, atol=1e-6, where=None)
        case = call(NORM, "AReaL", "normalization", params, {"x": values})
        found = verdict(replace(case, algorithm="reward_norm", outputs={"y": field}))
        assert (found.status, found.detail) == (Status.RULE, RULES[5].name)


@pytest.mark.parametrize("mean", ["group", "batch"])
def test_a_row_without_others_differs_by_a_rule(mean: str) -> None:
    """AReaL's leave-one-out mean of no rows is 0 where the other rows of a group are not rewarded."""
    mask = torch.tensor([1, 0, 0, 1, 1] if mean == "group" else [0, 0, 1, 0, 0]).bool()
    params = {"mean_level": mean, "std_level": None, "mean_leave1out": True, "std_unbiased": True, "eps": 1e-5}
    params |= {"group_size": 5, "group_sizes": [3, 2]}
    values = rewards(1, 5)
    theirs = areal_normalised(values, mask, [3, 2], params)
    case = call(NORM, "AReaL", "normalization", params, {"x": values, "loss_mask": mask})
    field = Field(value=theirs.numpy(), rtol=1e-4, atol=1e-6, where=None)
    found = verdict(replace(case, algorithm="reward_norm_masked", outputs={"y": field}))
    assert (found.status, found.detail) == (Status.RULE, RULES[0].name)


def test_the_last_rows_of_areal_have_to_fill_a_group() -> None:
    params = {"mean_level": "group", "std_level": None, "mean_leave1out": False, "std_unbiased": True, "group_size": 4}
    assert not_offered(call(NORM, "AReaL", "normalization", params, {"x": rewards(1, 9)})) == "group_size=4"


def test_other_dimensions_and_baselines() -> None:
    values, mask = rewards(1, ROWS, LENGTH), inputs()["mask"] | torch.eye(ROWS, LENGTH, dtype=torch.bool)
    mask[0], mask[:, 0] = True, True
    for dim in (None, 0, 1):
        case = call("utils.py:masked_normalize", "OpenRLHF", "normalization", {"dim": dim}, {"x": values, "mask": mask})
        number = mask.sum(dim, keepdim=dim is not None)
        mean = (values * mask).sum(dim, keepdim=dim is not None) / number
        variance = ((values - mean) * mask).square().sum(dim, keepdim=dim is not None) / number
        same(replayed(case)["y"][mask], ((values - mean) * variance.clamp(min=1e-8).rsqrt())[mask])
    scores, valid = rewards(2), torch.tensor([1, 1, 1, 0, 1, 1]).bool()
    x = {"rewards": scores, "group": GROUPS, "valid": valid}
    function = "utils.py:calculate_baseline_and_std_per_prompt"
    found = replayed(call(function, "NeMo-RL", "normalization", {"leave_one_out_baseline": False}, x))
    members = [scores[valid & (group == GROUPS)] for group in GROUPS]
    same(found["baseline"], torch.stack([one.mean() for one in members]))
    same(found["std"], torch.stack([one.std() for one in members]))


# reductions


@pytest.mark.parametrize(
    "mode", ["token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]
)
def test_skyrls_reductions(mode: str) -> None:
    x, params = inputs(), {"loss_reduction": mode, "max_seq_len": 11, "micro_batch_size": 3}
    params |= {"prompt_boundaries": [[0, 2], [2, 6]]}
    function = "ppo_utils.py:apply_loss_reduction_to_advantages_minibatch"
    arrays = {name: x[name] for name in ("adv", "mask")}
    found = replayed(call(function, "SkyRL", "loss_aggregation", params, arrays))
    same(found["scaled_advantages"], x["adv"] * reduction_weights(x["mask"], params))
    if mode == "token_mean_legacy":
        uneven = params | {"micro_batch_size": 4}
        found = replayed(call(function, "SkyRL", "loss_aggregation", uneven, arrays))
        same(found["scaled_advantages"], x["adv"] * reduction_weights(x["mask"], uneven))
    params = {name: params[name] for name in params if name != "prompt_boundaries"}
    params |= {"mini_batch_boundaries": "[(0,B//2),(B//2,B)]", "advantage_batch_normalize": False}
    if mode != "prompt_mean":
        scaled = call("trainer.py:_normalize_advantages", "SkyRL", "normalization", params, arrays)
        halves = [reduction_weights(half, params) for half in x["mask"].split(3)]
        same(replayed(scaled)["scaled_advantages"], x["adv"] * torch.cat(halves))
        values = x["adv"] * x["mask"]  # SkyRL's mean counts padding, its deviation does not
        deviation = ((values - values.mean()).square() * x["mask"]).sum() / x["mask"].sum()
        theirs = (values - values.mean()) / deviation.sqrt() * torch.cat(halves)
        field = Field(value=theirs.numpy(), rtol=1e-4, atol=1e-7, where=x["mask"].numpy())
        case = call(
            "_normalize_advantages", "SkyRL", "normalization", params | {"advantage_batch_normalize": True}, arrays
        )
        case = replace(case, algorithm="advantage_batch_norm_then_scale", outputs={"scaled_advantages": field})
        assert verdict(case).detail == "advantages are centered over the valid tokens"


@pytest.mark.parametrize("per_token", [True, False])
def test_reductions_over_counts_of_all_ranks(per_token: bool) -> None:
    x = inputs()
    arrays, mask = {"loss_mat": x["adv"], "mask": x["mask"]}, x["mask"]
    sums, means = torch.where(mask, x["adv"], 0.0).sum(), row_mean(x["adv"], mask).sum()
    for total, ranks in ((None, 1), (40.0, 3)):
        wanted = sums / (total or mask.sum()) if per_token else means / (total or mask.any(-1).sum())
        params = {"token_level_loss": per_token, "batch_num_tokens": total, "global_batch_size": total}
        params |= {"dp_size": ranks}
        same(replayed(call("aggregate_loss", "OpenRLHF", "loss_aggregation", params, arrays))["loss"], wanted * ranks)
    denominators = torch.tensor([9.0, 9, 11, 11, 11, 4])
    params = {"calculate_per_token_loss": per_token, "sample_denoms": True}
    found = replayed(
        call("get_sum_of_sample_mean", "slime", "loss_aggregation", params, arrays | {"denoms": denominators})
    )
    by_row = torch.where(mask, x["adv"], 0.0).sum(-1)
    same(found["loss"], by_row.sum() if per_token else (by_row / denominators).sum())


# KL estimators, heads, value losses


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("bounds", [(None, None), (0.2, None), (None, 0.03), (0.2, 0.03)])
def test_nemos_kl(name: str, bounds: tuple[float | None, float | None]) -> None:
    x = inputs()
    params = {"kl_type": name, "input_clamp_value": bounds[0], "output_clamp_value": bounds[1]}
    low, high = (math.inf if bound is None else bound for bound in bounds)
    gap = (x["logp"] - x["ref_logp"]).clamp(-low, low)
    arrays = {key: x[key] for key in ("logp", "ref_logp")}
    found = replayed(call("utils.py:calculate_kl", "NeMo-RL", "kl_estimators", params, arrays))
    same(found["kl"], kl(name, gap, gap * 0).clamp(-high, high))
    other = params | {"importance_sampling_weights": "exp(logp - rollout_logp)"}
    named = not_offered(call("utils.py:calculate_kl", "NeMo-RL", "kl_estimators", other, arrays))
    assert named == "importance_sampling_weights='exp(logp - rollout_logp)'"


@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3"])
def test_skyrls_kl_with_and_without_its_mask(name: str) -> None:
    x = inputs()
    arrays = {key: x[key] for key in ("logp", "ref_logp", "mask")}
    for masked in (True, False):
        params = {"kl_estimator_type": name, "loss_mask": masked}
        found = replayed(call("compute_approx_kl", "SkyRL", "kl_estimators", params, arrays))
        wanted = kl(name, x["logp"], x["ref_logp"])
        same(found["kl"], torch.where(x["mask"], wanted, 0.0) if masked else wanted)


def test_log_probabilities_of_several_entries() -> None:
    logits = rewards(1, 3, 4, 8)
    labels = torch.randint(8, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    function = "trl/trainer/utils.py:entropy_from_logits; selective_log_softmax"
    found = replayed(call(function, "trl", "entropy_logprob", {}, {"logits": logits, "labels": labels}))
    logits.requires_grad_()
    wanted = logits.log_softmax(-1).gather(-1, labels)
    same(found["logp"], wanted)
    same(found["grad_logits_logp"], torch.autograd.grad(wanted.sum(), logits)[0])
    same(found["entropy"], -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))


@pytest.mark.parametrize("kind", ["mse", "huber"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_areals_value_loss(kind: str, clip: float | None) -> None:
    x = inputs()
    arrays = {"values": x["adv"], "old_values": x["logp"], "returns": x["old_logp"], "mask": x["mask"]}
    params = {"loss_fn_type": kind, "huber_delta": 0.7 if kind == "huber" else None, "value_eps_clip": clip}
    found = replayed(call("ppo_critic_loss_fn", "AReaL", "value_loss", params, arrays))

    def error(values: Tensor) -> Tensor:
        gap = (values - arrays["returns"]).abs()
        return gap.square() / 2 if kind == "mse" else torch.where(gap < 0.7, gap.square() / 2, 0.7 * (gap - 0.35))

    tokens = error(arrays["values"])
    if clip is not None:
        bounded = arrays["old_values"] + (arrays["values"] - arrays["old_values"]).clamp(-clip, clip)
        tokens = torch.maximum(tokens, error(bounded))
    same(found["loss"], tokens[x["mask"]].mean())


@pytest.mark.parametrize("mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_verls_value_loss(mode: str) -> None:
    x = inputs()
    mask = x["mask"]
    arrays = {"values": x["adv"], "old_values": x["adv"], "returns": x["old_logp"], "mask": mask}
    params = {"cliprange_value": 0.1, "loss_agg_mode": mode}
    found = replayed(call("compute_value_loss", "verl", "value_loss", params, arrays))["loss"]
    total, rows = (x["adv"] - x["old_logp"]).square()[mask].sum() / 2, mask.any(-1).sum()
    divisor = {
        "token-mean": mask.sum(),
        "token-sum": 1,
        "seq-mean-token-sum": rows,
        "seq-mean-token-sum-norm": rows * 7,
    }
    same(found, total / divisor[mode])


# weights and masks without a loss


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", ["1.1", "0.9_1.2", "1.05_1.4"])
@pytest.mark.parametrize("normal", [True, False])
def test_verls_weights(level: str, threshold: str, normal: bool) -> None:
    x = inputs()
    mask, gap = x["mask"], x["old_logp"] - x["rollout_logp"]
    params = {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_is_batch_normalize": normal}
    params |= {"rollout_rs": None}
    arrays = {name: x[name] for name in ("old_logp", "rollout_logp", "mask")}
    function = "rollout_corr_helper.py:compute_rollout_correction_and_rejection_mask"
    found = replayed(call(function, "verl", "off_policy", params, arrays))["is_weights"]
    ratio = gap.exp() if level == "token" else torch.where(mask, gap, 0.0).sum(-1, keepdim=True).exp().expand_as(gap)
    low, _, high = threshold.rpartition("_")
    inside = (ratio >= float(low or 0)) & (ratio <= float(high))
    weight = ratio * inside if low else ratio.clamp(max=float(high))
    mean = weight[mask].mean() if level == "token" else row_mean(weight, mask)[mask.any(-1)].mean()
    same(found[mask], (weight / mean if normal else weight)[mask])


VERL_STATISTICS = ["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1"]
VERL_STATISTICS += ["seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3", "binary_kl"]


def verl_kept(x: dict[str, Tensor], statistic: str, threshold: str) -> Tensor:
    gap, mask = (x["old_logp"] - x["rollout_logp"]), x["mask"]
    level, _, name = statistic.rpartition("_")
    p, q = x["old_logp"].exp(), x["rollout_logp"].exp()
    if statistic == "binary_kl":
        both = [a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log() for a, b in ((p, q), (q, p))]
        return torch.maximum(*both) <= float(threshold)
    values = {"k1": -gap, "k2": gap.square() / 2, "k3": gap.exp() - 1 - gap}[name]
    rows = torch.where(mask, values, 0.0)
    row = {"token": values, "seq_sum": rows.sum(-1, keepdim=True), "seq_mean": row_mean(values, mask)}
    row |= {"seq_max": rows.amax(-1, keepdim=True)}
    low, _, high = threshold.rpartition("_")
    if name != "k1":
        return row[level] <= float(threshold)
    lowest = float(low) if low else 1 / float(high)
    return (row[level] >= math.log(lowest)) & (row[level] <= math.log(float(high)))


@pytest.mark.parametrize("statistic", VERL_STATISTICS)
@pytest.mark.parametrize("second", ["", "token_k2", "seq_max_k3"])
def test_verls_rejections(statistic: str, second: str) -> None:
    x = inputs()
    arrays = {name: x[name] for name in ("old_logp", "rollout_logp", "mask")}
    thresholds = ["0.85_1.1", "1.2"] if statistic.endswith("k1") else ["0.03", "0.2"]
    for threshold in thresholds:
        params = {"rollout_is": None, "rollout_rs": statistic, "rollout_rs_threshold": threshold}
        kept = verl_kept(x, statistic, threshold)
        if second not in ("", statistic):
            params |= {"rollout_rs": f"{statistic},{second}", "rollout_rs_threshold": f"{threshold},0.05"}
            kept = kept & verl_kept(x, second, "0.05")
        function = "rollout_corr_helper.py:compute_rollout_correction_and_rejection_mask"
        found = replayed(call(function, "verl", "off_policy", params, arrays))
        assert torch.equal(found["modified_mask"], x["mask"] & kept)


# slime's whole loss


SLIME = "slime/backends/megatron_utils/loss.py:policy_loss_function"
ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
PLAIN = {
    "use_rollout_logprobs": False, "rollout_top_p": 1.0, "rollout_temperature": 1.0, "entropy_coef": 0.0,
    "use_opsm": False, "opsm_delta": 0.02, "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.3,
    "eps_clip_c": None, "get_mismatch_metrics": False, "use_tis": False, "custom_tis_function_path": None,
    "tis_clip": 1.3, "tis_clip_low": 0.8, "use_kl_loss": False, "kl_loss_type": "k3", "kl_loss_coef": 0.1,
    "use_unbiased_kl": False, "calculate_per_token_loss": False,
}  # fmt: skip


def packed_rows() -> tuple[dict[str, Tensor], list[slice]]:
    """Return three sequences one after the other, and the positions of their responses among all responses."""
    random = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)  # noqa: E731
    totals, lengths = torch.tensor([7, 5, 6]), torch.tensor([4, 2, 5])
    x = {"total_lengths": totals, "response_lengths": lengths, "logits": draw(18, 9)}
    x["tokens"] = torch.randint(9, (18,), generator=random)
    x["mask"] = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]).bool()
    x["advantages"] = torch.tensor([0.7, -1.2, -0.4], dtype=torch.float64).repeat_interleave(lengths)
    x["keep_mask"] = torch.rand(18, 9, generator=random) < 0.8
    ends = lengths.cumsum(0).tolist()
    places = slime_places(x)
    now = x["logits"].log_softmax(-1)[places - 1].gather(-1, x["tokens"][places][:, None])[:, 0]
    x |= {name: now + 0.2 * draw(11) for name in ("old_logp", "rollout_logp", "ref_logp")}
    return x, [slice(end - length, end) for end, length in zip(ends, lengths.tolist(), strict=True)]


def slime_places(x: dict[str, Tensor]) -> Tensor:
    ends = x["total_lengths"].cumsum(0).tolist()
    spans = zip(ends, x["response_lengths"].tolist(), strict=True)
    return torch.cat([torch.arange(end - length, end) for end, length in spans])


def slime_loss(x: dict[str, Tensor], rows: list[slice], p: dict[str, Any], logits: Tensor) -> Tensor:
    mask, advantages, places = x["mask"], x["advantages"], slime_places(x)
    rows_of_logits, labels = logits[places - 1] / p["rollout_temperature"], x["tokens"][places][:, None]
    log_softmax = rows_of_logits.log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    if p["rollout_top_p"] < 1:
        kept = x["keep_mask"][places - 1].scatter(-1, labels, value=True)
        log_softmax = rows_of_logits.masked_fill(~kept, -math.inf).log_softmax(-1)
    now = log_softmax.gather(-1, labels)[:, 0]
    old = x["rollout_logp"] if p["use_rollout_logprobs"] else x["old_logp"]
    mean = lambda values: torch.stack([values[r][mask[r]].mean() for r in rows])  # noqa: E731
    spread = lambda values: torch.cat([values[k].expand(r.stop - r.start) for k, r in enumerate(rows)])  # noqa: E731
    gap = now - old
    ratio = spread(mean(gap)).exp() if p["advantage_estimator"] == "gspo" else gap.exp()
    clipped = ratio.clamp(1 - p["eps_clip"], 1 + p["eps_clip_high"])
    tokens = torch.maximum(-ratio * advantages, -clipped * advantages)
    if p["eps_clip_c"] is not None:
        tokens = torch.where(advantages < 0, torch.minimum(tokens, -p["eps_clip_c"] * advantages), tokens)
    if p["advantage_estimator"] == "cispo":
        tokens = -clipped.detach() * advantages * now
    if p["use_opsm"]:
        rejected = (mean(advantages) < 0) & (mean((old - now).detach()) > p["opsm_delta"])
        tokens = tokens * ~spread(rejected)
    if p["use_tis"] or p["get_mismatch_metrics"]:
        weight = (x["old_logp"] - x["rollout_logp"]).exp()
        inside = (weight >= p["tis_clip_low"]) & (weight <= p["tis_clip"])
        tokens = tokens * (
            weight.clamp(p["tis_clip_low"], p["tis_clip"]) if p["custom_tis_function_path"] is None else weight * inside
        )
    tokens = tokens - p["entropy_coef"] * entropy
    if p["use_kl_loss"]:
        penalty = kl(p["kl_loss_type"], now, x["ref_logp"]) * (gap.exp() if p["use_unbiased_kl"] else 1.0)
        tokens = tokens + p["kl_loss_coef"] * penalty
    return tokens[mask].sum() if p["calculate_per_token_loss"] else mean(tokens).sum()


@pytest.mark.parametrize(
    "chosen",
    [
        *options(use_tis=(True, False), custom_tis_function_path=(None, ICEPOP), use_rollout_logprobs=(False, True)),
        *options(get_mismatch_metrics=(True,), custom_tis_function_path=(None, ICEPOP)),
        *options(advantage_estimator=("gspo", "cispo", "grpo"), eps_clip_c=(None,), use_rollout_logprobs=(False, True)),
        *options(advantage_estimator=("gspo", "grpo"), eps_clip_c=(1.1,), use_opsm=(False, True)),
        *options(use_opsm=(True,), use_rollout_logprobs=(False, True), opsm_delta=(0.0, 0.05)),
        *options(use_kl_loss=(True,), use_unbiased_kl=(True, False), use_rollout_logprobs=(False, True)),
        *options(use_kl_loss=(True,), kl_loss_type=("k1", "k2", "k3"), use_unbiased_kl=(True,)),
        *options(rollout_top_p=(0.9,), entropy_coef=(0.0, 0.3), rollout_temperature=(1.0, 0.7)),
        *options(calculate_per_token_loss=(True,), use_tis=(True, False)),
    ],
    ids=str,
)
def test_slimes_whole_loss(chosen: dict[str, Any]) -> None:
    x, rows = packed_rows()
    params = PLAIN | chosen
    found = replayed(call(SLIME, "slime", "policy_loss", params, x))
    logits = x["logits"].clone().requires_grad_()
    loss = slime_loss(x, rows, params, logits)
    same(found["loss"], loss)
    same(found["grad_logits"], torch.autograd.grad(loss, logits)[0])


# parameters that are not offered


@pytest.mark.parametrize(
    ("peer", "topic", "function", "params", "named"),
    [
        ("slime", "policy_loss", SLIME, PLAIN | {"use_tis": True, "custom_tis_function_path": "a.b"},
         "custom_tis_function_path='a.b'"),
        ("slime", "policy_loss", SLIME, PLAIN | {"advantage_estimator": "another"}, "advantage_estimator='another'"),
        ("verl", "policy_loss", "compute_policy_loss_clip_cov", {"clip_cov_ratio": 0.5}, "clip_cov_ratio=0.5"),
        ("verl", "policy_loss", "compute_policy_loss_vanilla", {"loss_agg_mode": "median"}, "loss_agg_mode='median'"),
        ("verl", "policy_loss", "compute_policy_loss_vanilla", {"of_tomorrow": 2}, "of_tomorrow=2"),
        ("trl", "policy_loss", "GRPOTrainer._compute_loss", {"loss_type": "another"}, "loss_type='another'"),
        ("trl", "policy_loss", "GRPOTrainer._compute_loss", {"loss_type": "grpo", "delta": 0.9}, "delta=0.9"),
        ("trl", "policy_loss", "RLOOTrainer._compute_loss", {"gradient_accumulation_steps": 2},
         "gradient_accumulation_steps=2"),
        ("NeMo-RL", "policy_loss", "ClippedPGLossFn", {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
         "ratio_clip_c=3.0"),
        ("open-instruct", "policy_loss", "compute_grpo_loss", {"loss_fn": "dppo"}, "loss_fn='dppo'"),
        ("prime-rl", "policy_loss", "compute_loss", {"rl": "custom"}, "rl='custom'"),
        ("AReaL", "off_policy", "ppo_actor_loss_fn", {"rejection_sampling": {"metric": "tv", "upper": 1.0}},
         "metric='tv'"),
        ("AReaL", "off_policy", "ppo_actor_loss_fn", {"rejection_sampling": {"upper": 1.0, "deep": {"a": 1}}},
         "rejection_sampling.deep={'a': 1}"),
        ("AReaL", "off_policy", "grpo_loss_fn", {"prox_logp_method": "loglinear"}, "prox_logp_method='loglinear'"),
        ("AReaL", "kl_estimators", "compute_binary_kl_divergence", {"eps": 1e-4}, "eps=0.0001"),
        ("SkyRL", "off_policy", "ppo_policy_loss", {"off_policy_correction": {"tis_ratio_type": "geometric"}},
         "tis_ratio_type='geometric'"),
        ("OpenRLHF", "advantages_token", "compute_advantages_and_returns", {"estimator": "reinforce_max"},
         "estimator='reinforce_max'"),
        ("NeMo-RL", "advantages_outcome", "AnotherEstimator.compute_advantage", {},
         "function='AnotherEstimator.compute_advantage'"),
        ("verl", "another_topic", "compute_policy_loss_vanilla", {}, "topic='another_topic'"),
    ],
    ids=lambda value: value if isinstance(value, str) and "=" in value else "",
)  # fmt: skip
def test_what_is_not_offered_is_named(peer: str, topic: str, function: str, params: dict[str, Any], named: str) -> None:
    x = packed_rows()[0] if function == SLIME else inputs()
    x |= {f"{name}_weights": x["mask"] * 1.0 for name in ("rl", "ce", "ref_kl")} if peer == "prime-rl" else {}
    if topic == "advantages_token" or peer == "trl":
        x |= {"rewards": rewards(1), "kl": x["adv"], "group": GROUPS, "advantages": x["adv"][:, 0]}
    assert not_offered(call(function, peer, topic, params, x)) == named
