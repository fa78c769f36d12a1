"""Parity: recorded calls of other systems, replayed with our functions. The adapter is in :mod:`goldens`."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from goldens.cases import Case, Field, read_folder
from goldens.command import main
from goldens.page import page
from goldens.params import Params
from goldens.registry import NOT_OFFERED, replay_of
from goldens.report import table
from goldens.rules import RULES
from goldens.verdict import Status, Verdict, verdict

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "goldens"
FURTHER = ROOT / "tests" / "data" / "goldens_more"
NUMBER = 1688 + 91

OURS = (
    "kl_k1", "kl_abs", "kl_k2", "kl_k3", "kl_low_var_clamped", "kl_k1_unbiased", "kl_k3_unbiased",
    "grpo", "dr_grpo", "rloo", "maxrl", "reinforce", "raw_reward", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "remax", "opo", "gae", "discounted_returns", "kl_shaped_reward", "dapo_overlong",
    "reward_norm", "reward_norm_masked", "masked_whiten", "no_eos_reward_norm", "overlong_filtering",
    "ppo_clip", "ppo_clip_dual", "ppo_clip_with_kl", "gspo", "gspo_token", "cispo", "cispo_rollout_anchor",
    "dppo_binary_tv", "dppo_binary_kl", "sapo", "clip_cov", "kl_cov", "gmpo", "m2po", "m2po_mask", "value_clip",
    "value_mse", "policy_loss_pipeline", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean",
    "off_policy_is_current_over_rollout", "tis_token", "tis_sequence", "icepop", "icepop_token_mask",
    "geometric_sequence_mask", "sequence_geometric_mask", "product_sequence_mask", "sequence_product_mask",
    "outlier_token_veto", "opsm", "rollout_kl_loss", "reference_kl_loss", "ppo_raw_kl",
    "entropy_and_selective_log_softmax", "gae_turn_level", "gae_vapo_length_adaptive", "gae_length_adaptive",
    "gae_relative_position", "gpg", "grpo_batch_std", "grpo_passk", "kl_binary", "optimal_token_baseline",
    "tir_optimal_token_baseline",
)  # fmt: skip
"""What the library offers by name."""


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [*read_folder(FOLDER), *read_folder(FURTHER)]


@pytest.fixture(scope="module")
def verdicts(cases: list[Case]) -> list[Verdict]:
    return [verdict(case) for case in cases]


def test_no_case_fails(verdicts: list[Verdict]) -> None:
    assert [(one.case.id, one.detail) for one in verdicts if one.status is Status.FAILED] == []
    assert len(verdicts) == NUMBER


def test_every_algorithm_of_ours_is_recorded_and_offered(verdicts: list[Verdict]) -> None:
    absent = {one.case.algorithm for one in verdicts if one.status is Status.NOT_OFFERED}
    assert set(OURS) - {one.case.algorithm for one in verdicts} == set()
    assert absent & set(OURS) == set()
    assert absent == set(NOT_OFFERED), "and what is not offered is listed with its reason"


def test_every_case_of_a_pull_request_matches(verdicts: list[Verdict]) -> None:
    found = Counter(one.status for one in verdicts if one.case.from_pull_request)
    assert found == {Status.MATCHED: 34}


def test_few_cases_differ_on_purpose(verdicts: list[Verdict]) -> None:
    general = [one for one in verdicts if one.case.algorithm in OURS and "peer_specific" not in one.case.tags]
    ruled = [one for one in general if one.status is Status.RULE]
    assert {one.status for one in general} == {Status.MATCHED, Status.RULE}
    assert len(ruled) <= 0.05 * len(general)


def test_every_rule_covers_a_case(verdicts: list[Verdict]) -> None:
    assert {one.detail for one in verdicts if one.status is Status.RULE} == {rule.name for rule in RULES}


def test_the_page_lists_the_rules_and_their_cases(verdicts: list[Verdict]) -> None:
    assert page(verdicts) in (ROOT / "docs" / "evidence.md").read_text(), "python -m tests.goldens ... --page"


def with_output(case: Case, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Case:
    field = case.outputs[name]
    return replace(case, outputs={**case.outputs, name: replace(field, value=change(field.value.copy()))})


@pytest.mark.parametrize("topic", sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir()))
def test_one_per_cent_off_is_a_failure(topic: str, cases: list[Case], verdicts: list[Verdict]) -> None:
    matched = [one.case for one in verdicts if one.status is Status.MATCHED and one.case.topic == topic]
    case = next(case for case in matched if decisive(case))
    name = decisive(case)
    found = verdict(with_output(case, name, lambda value: value * np.asarray(1.01, value.dtype)))
    assert (found.status, found.detail.split()[0]) == (Status.FAILED, name)
    assert f"FAILED  {case.id}  {name}" in table([found])


def decisive(case: Case) -> str:
    """A compared output with a value so large that one per cent is no rounding."""
    named = ("loss", "kl", "advantages", "y", "rewards_out", "token_rewards", "logp", "is_weights", "returns")
    return next((name for name in named if name in case.outputs and largest(case.outputs[name]) > 0.1), "")


def largest(field: Field) -> float:
    counted = field.value if field.where is None else field.value[field.where]
    return float(np.abs(counted).max(initial=0.0))


def test_a_rule_excuses_nothing_but_what_it_predicts(verdicts: list[Verdict]) -> None:
    ruled = [one.case for one in verdicts if one.status is Status.RULE and one.detail == RULES[0].name]
    rows = next(case for case in ruled if "advantages" in case.outputs)
    alone = (rows.ids()[:, None] == rows.ids()).sum(-1) == 1
    assert verdict(with_output(rows, "advantages", added_to(alone.numpy()))).status is Status.RULE
    assert verdict(with_output(rows, "advantages", added_to(~alone.numpy()))).status is Status.FAILED


def added_to(rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    return lambda value: (value + 0.5 * rows[:, None]).astype(value.dtype)


@pytest.mark.parametrize(
    ("peer", "algorithm", "params"),
    [
        ("AReaL", "advantage_norm", {"mean_level": None, "mean_leave1out": True}),
        ("AReaL", "reward_norm", {"mean_level": "batch", "std_level": "group", "mean_leave1out": True}),
        ("AReaL", "icepop", {"rejection_sampling": {"action": "clamp", "metric": "kl_k1", "upper": 0.5}}),
        ("AReaL", "cispo", {"eps_clip": 4.0}),
        ("trl", "ppo_clip_two_sided_delta", {"delta": 1.1}),
        ("trl", "cispo", {"epsilon_high": 0.2}),
        ("open-instruct", "icepop", {"rho_mask_tv_divergence": True}),
        ("slime", "policy_loss_pipeline", {"rollout_top_p": 0.9}),
        ("verl", "rejection_mask", {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "0.01"}),
        ("verl", "kl_k1", {"kl_penalty": "k1+"}),
    ],
)
def test_parameters_that_no_case_has_are_replayed(
    peer: str, algorithm: str, params: dict[str, object], cases: list[Case]
) -> None:
    case = next(case for case in cases if (case.peer, case.algorithm) == (peer, algorithm))
    found = verdict(replace(case, params={**case.params, **params}))
    assert found.status is not Status.NOT_OFFERED and not found.detail.startswith("call"), found.detail


@pytest.mark.parametrize("delta", [1.05, 1.2, 2.0])
def test_a_cap_on_the_ratio_is_trls_wherever_it_lies(delta: float, cases: list[Case]) -> None:
    case = next(case for case in cases if case.algorithm == "ppo_clip_two_sided_delta")
    case = replace(case, params={**case.params, "delta": delta})
    ratio, advantages, mask = (case["logp"] - case["old_logp"]).exp(), case["advantages"].view(-1, 1), case.mask()
    clipped = ratio.clamp(1 - case.params["epsilon_low"], 1 + case.params["epsilon_high"])
    loss = -torch.minimum(ratio.clamp(max=delta) * advantages, clipped * advantages)[mask].mean()
    assert replay_of(case)(case)["loss"].item() == pytest.approx(loss.item(), rel=1e-5)


def of(cases: list[Case], algorithm: str, **params: object) -> Verdict:
    """The verdict on the first case of an algorithm with other parameters."""
    case = next(case for case in cases if case.algorithm == algorithm)
    return verdict(replace(case, params={**case.params, **params}))


@pytest.mark.parametrize(
    ("algorithm", "params", "name"),
    [
        ("ppo_clip", {"of_tomorrow": 0.5}, "of_tomorrow=0.5"),
        ("ppo_clip", {"positive_example_nll_weight": 0.1}, "positive_example_nll_weight=0.1"),
        ("gpg", {"f_norm": 2.0}, "f_norm=2.0"),
        ("dr_grpo", {"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ("icepop", {"rejection_sampling": {"level": "token", "of_tomorrow": {"deep": 1}}}, "rejection_sampling"),
    ],
)
def test_a_parameter_that_nobody_reads_is_not_offered(
    algorithm: str, params: dict[str, object], name: str, cases: list[Case]
) -> None:
    found = of(cases, algorithm, **params)
    assert found.status is Status.NOT_OFFERED and found.detail.startswith("parameter ") and name in found.detail


@pytest.mark.parametrize("level", ["group", "batch"])
def test_leaving_out_the_only_row_teaches_nothing_and_a_rule_says_so(level: str, cases: list[Case]) -> None:
    """AReaL lets the raw 5.0 through, from which nobody's mean is subtracted."""
    case = next(case for case in cases if (case.peer, case.algorithm) == ("AReaL", "reward_norm"))
    alone = [1, 3] if level == "group" else [1]
    values = np.array([5.0, 1.0, 2.0, 6.0][: sum(alone)], np.float32)
    theirs = np.array([5.0, -3.0, -1.5, 4.5][: sum(alone)], np.float32)
    params = {"mean_level": level, "std_level": None, "mean_leave1out": True, "std_unbiased": True, "eps": 1e-5}
    params |= {"group_size": 1, "group_sizes": alone}
    field = replace(case.outputs["y"], value=theirs)
    found = verdict(replace(case, params=params, arrays={"x": values}, outputs={"y": field}))
    assert (found.status, found.detail) == (Status.RULE, "a group of one teaches nothing: 0")
    field = replace(
        field, value=theirs + np.array([0.0, 0.5, 0.0, 0.0][: sum(alone)] if level == "group" else [0.0], np.float32)
    )
    found = verdict(replace(case, params=params, arrays={"x": values}, outputs={"y": field}))
    assert found.status is (Status.FAILED if level == "group" else Status.RULE)


def test_what_is_looked_up_is_known_at_every_depth() -> None:
    params = Params({"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": 4})
    assert params["a"] == 1 and params["b"].get("c") == 2 and "f" in params
    assert params.unread() == {"b.d": {"e": 3}}
    assert params["b"]["d"].get("e") == 3 and params.unread() == {}
    assert Params(params).unread() == {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": 4}, "a copy is unread"


def test_no_deviation_is_taken_where_openrlhf_says_so(cases: list[Case]) -> None:
    case = next(case for case in cases if (case.peer, case.algorithm) == ("OpenRLHF", "reinforce_plus_plus"))
    centred = replay_of(case)(replace(case, params={**case.params, "no_std_norm": True}))["advantages"]
    whitened, mask = replay_of(case)(case)["advantages"], case.mask()
    assert abs(float(centred[mask].mean())) < 1e-5
    torch.testing.assert_close(centred / centred[mask].std(correction=0), whitened)


def test_the_kl_of_nemo_is_weighed_with_the_ratio_to_the_engine(cases: list[Case]) -> None:
    case = next(case for case in cases if (case.peer, case.algorithm) == ("NeMo-RL", "ppo_clip_with_kl"))
    logp, old, ref = case["logp"].double(), case["old_logp"].double(), case["ref_logp"].double()
    mask = case.mask() & case.mask("sample_mask")[:, None]
    case = replace(case, arrays={**case.arrays, "rollout_logp": case.arrays["old_logp"]})

    def loss(*, approximated: bool) -> float:
        params = {**case.params, "use_on_policy_kl_approximation": approximated, "reference_policy_kl_type": "k2"}
        return float(replay_of(case)(replace(case, params=params))["loss"])

    kl = 0.5 * (logp - ref).clamp(-20, 20).square()
    weighed, plain = (((logp - old).exp() * kl).clamp(-10, 10), kl.clamp(-10, 10))
    wanted = 0.05 * float((weighed - plain)[mask].sum()) / float(mask.sum())
    assert abs(wanted) > 1e-4
    assert loss(approximated=True) - loss(approximated=False) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("gap", [19.0, 25.0])
@pytest.mark.parametrize(("algorithm", "peer"), [("icepop", "slime"), ("off_policy_is_current_over_rollout", "slime")])
def test_an_extreme_ratio_is_asked_for_with_the_bound_of_the_peer(
    algorithm: str, peer: str, gap: float, cases: list[Case]
) -> None:
    case = next(one for one in cases if (one.algorithm, one.peer) == (algorithm, peer) and "ratio" in one.outputs)
    name = "logp" if "logp" in case else "old_logp"
    arrays = {**case.arrays, name: case.arrays["rollout_logp"] + np.float32(gap)}
    ratio = replay_of(case)(replace(case, arrays=arrays))["ratio"]
    assert float(ratio.max()) == pytest.approx(float(np.exp(gap)), rel=1e-4)


def test_an_unknown_algorithm_is_not_offered(cases: list[Case]) -> None:
    found = verdict(replace(cases[0], algorithm="of_tomorrow"))
    assert (found.status, found.detail) == (Status.NOT_OFFERED, "unknown algorithm")


def test_an_exception_is_a_failure_of_its_case_with_its_message(cases: list[Case]) -> None:
    case = next(case for case in cases if case.algorithm == "value_clip")
    found = verdict(replace(case, arrays={}))
    assert found.status is Status.FAILED and "KeyError" in found.detail


def test_an_output_that_nobody_computes_is_a_failure(cases: list[Case]) -> None:
    case = next(case for case in cases if case.algorithm == "value_clip")
    found = verdict(replace(case, outputs={**case.outputs, "advantages": case.outputs["loss"]}))
    assert found.status is Status.FAILED and "no value" in found.detail


def test_the_command_fails_without_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert main([]) == 2
    assert "FOLDER" in capsys.readouterr().out
