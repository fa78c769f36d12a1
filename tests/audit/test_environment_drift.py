"""Drift of environment tokens: separated from sampled tokens by turn, and found if they train."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.conversations import leak_mask, talking_module
from kit.evidence import evidence_of
from kit.support import fit
from torch import Tensor
from typing_extensions import override

from lightning_rl import PromptDataModule, Rollout
from lightning_rl.advantages import Advantages, Estimator, RewardSignal
from lightning_rl.audit import CHECKS, SignalAudit, environment_drift
from lightning_rl.audit.checks.conversation_checks import LEAST_MOVES
from lightning_rl.audit.environment_drift import KEPT, MAX_ROWS, MAX_TOKENS, Move, MoveWatch, _rows_of, log_odds
from lightning_rl.audit.evidence import Evidence
from lightning_rl.rollout import TURNS
from lightning_rl.rollouts.sample import Sampler

pytestmark = pytest.mark.filterwarnings("ignore:Found 1 environment:UserWarning", "ignore:the audit of rollout")


def talks(*turns: Sequence[int], prompt: int = 1) -> Rollout:
    """Return rows by the turn of each token: 0 for environment tokens, below 0 for a rewritten context."""
    width = max(map(len, turns))
    rollout = Rollout.of_samples(
        [[2] * prompt for _ in turns],
        [[5] * len(row) for row in turns],
        groups=[0] * len(turns),
        actions=[[number > 0 for number in row] for row in turns],
    )
    return rollout.replace(
        token_extras={TURNS: torch.tensor([[*row, *[0] * (width - len(row))] for row in turns])},
    )


def test_rows_in_which_an_environment_speaks_are_scored_whole() -> None:
    rollout = talks((1, 1), (1, 0, 2), (1, -1, -1, 2), (1, 0, 0, 2, 2))
    rows = _rows_of(rollout)
    assert (
        rows.sample_ids.tolist() == rollout.sample_ids[[1, 3]].tolist()
    )  # the others have no environment tokens that continue them
    assert rows.valid_tokens.sum(-1).tolist() == [3, 5]
    mixed = _rows_of(talks((1, 0, 2, -2, -2, 3)))
    assert mixed.valid_tokens[0].tolist() == [True, True, True, False, False, True]
    assert _rows_of(rollout.replace(trained=rollout.trained & (torch.arange(4) != 3))).sample_ids.tolist() == [
        int(rollout.sample_ids[1])
    ]


@pytest.mark.parametrize(
    ("prompt", "number"), [(1, MAX_ROWS), (96, MAX_TOKENS // 99), (2 * MAX_TOKENS, 1)], ids=["rows", "tokens", "one"]
)
def test_few_rows_are_scored_from_all_over_the_rollout(prompt: int, number: int) -> None:
    rows = _rows_of(talks(*[(1, 0, 2)] * 64, prompt=prompt))
    assert len(rows) == number
    assert rows.sample_ids.tolist() == [4 * place for place in range(number)]


class Scores:
    """Log-probabilities of a policy in successive calls."""

    def __init__(self, *said: Tensor) -> None:
        self.said = list(said)

    def __call__(self, _: Any, rows: Rollout) -> Any:
        """Return the next ones."""
        return SimpleNamespace(logprobs=self.said.pop(0)[:, : rows.width])


@pytest.mark.parametrize("leaks", [False, True])
def test_tokens_are_told_by_their_turn_and_not_by_the_mask_that_may_be_wrong(
    leaks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout = talks((1, 0, 0, 2))
    before, after = torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), torch.tensor([[-0.5, -1.0, -1.0, -4.5]])
    monkeypatch.setattr(environment_drift, "policy_outputs", Scores(before, after))
    watch = MoveWatch(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    watch.before(leak_mask(rollout) if leaks else rollout)
    (move,) = watch.after(3)
    odds = [math.log(math.expm1(0.5) / math.expm1(1.0)), math.log(math.expm1(4.5) / math.expm1(4.0))]
    assert move._replace(size=0.0) == Move(number=3, said=1.5, drawn=0.0, size=0.0, tokens=2)
    assert move.size == pytest.approx(math.hypot(*odds) / math.sqrt(2))
    assert len(watch.after(4)) == 1, "no rollout in between"


def test_the_last_rollouts_are_kept_and_those_without_an_environment_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MoveWatch(SimpleNamespace())  # pyright: ignore[reportArgumentType]
    for number in range(KEPT + 2):
        monkeypatch.setattr(environment_drift, "policy_outputs", Scores(torch.zeros(1, 3), torch.ones(1, 3)))
        watch.before(talks((1, 0, 2)))
        watch.after(number)
    assert [move.number for move in watch.moves] == list(range(2, KEPT + 2))
    watch.before(evidence_of().rollout)  # no further score is requested
    assert watch.after(KEPT + 2) == watch.moves


@pytest.mark.parametrize("shift", [0.0, 6.0, 10.0])
def test_log_odds_move_as_far_as_logits_however_sure_the_policy_is(shift: float) -> None:
    logits = torch.tensor([shift, 0.0], dtype=torch.float64)
    before, after = (one.log_softmax(-1)[0] for one in (logits, logits + torch.tensor([0.5, 0.0])))
    assert float(log_odds(after) - log_odds(before)) == pytest.approx(0.5)
    assert torch.isfinite(log_odds(torch.tensor([0.0, -1e-9, -100.0]))).all()


def evidence_from(*of_rollouts: Move) -> Evidence:
    return replace(evidence_of(), rollout=talks((1, 0, 2)), moves=of_rollouts)


@pytest.mark.parametrize(
    ("said", "drawn", "size", "found"),
    [
        (0.24, 0.0, 1.0, False),
        (0.26, 0.0, 1.0, True),
        (0.26, 0.1, 1.0, False),  # sampled tokens got likelier too
        (0.26, -0.5, 1.0, True),  # falling sampled tokens are no excuse
        (-3.0, 0.0, 1.0, False),
        (0.1, 0.0, 0.001, False),  # a near-certain policy; environment tokens drift too
        (0.2, 0.0, 0.001, True),
    ],
)
def test_what_rises_by_a_nat_and_a_quarter_of_what_the_policy_moves_is_found(
    said: float, drawn: float, size: float, *, found: bool
) -> None:
    check, move = CHECKS["environment_moves"], Move(0, said, drawn, size, 9)
    findings = check(evidence_from(*[move] * LEAST_MOVES))
    assert [finding.culprit.startswith("stage update") for finding in findings] == ([True] if found else [])
    assert check(evidence_from(*[move] * (LEAST_MOVES - 1))) == []
    skipped = check.judge(evidence_from(move)).skipped["environment_moves"]
    assert skipped == "1 of 6 rollouts with environment tokens were audited"
    assert check(replace(evidence_of(), moves=[move] * LEAST_MOVES)) == [], "no environment tokens in this rollout"


class RewardAlone(Estimator):
    """The score of a row, which is not negative, without a baseline, so all trained tokens get likelier.

    With a baseline, leaked environment tokens rise in good rows of a group and fall as much in the others.
    """

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        return Advantages(signal.spread_out(torch.where(signal.rewarded, signal.scores, 0.0)))


@pytest.mark.nightly
@pytest.mark.parametrize("leaks", [False, True])
def test_a_mask_that_leaks_shows_in_a_fit(leaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if leaks:
        lay_out = Sampler._lay_out  # noqa: SLF001
        monkeypatch.setattr(Sampler, "_lay_out", lambda *arguments: leak_mask(lay_out(*arguments)))
    audit = SignalAudit(1, checks=["environment_moves"])
    rows = [{"prompt": [2 + place % 11, 3 + place % 7], "place": place} for place in range(4 * LEAST_MOVES)]
    fit(
        talking_module(advantages=RewardAlone(), seed=1),
        data=PromptDataModule(rows, 4, shuffle=False),
        callbacks=[audit],
    )
    assert [finding.check for finding in audit.findings] == (["environment_moves"] if leaks else [])
