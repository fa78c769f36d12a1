"""Schedule: no check waits long, and checks of one rollout run at every audit."""

from itertools import chain

from lightning_rl.audit.checks import CHECKS
from lightning_rl.audit.schedule import FORMULAS, REPEATED, in_turn, takes_turn


def test_every_check_looks_at_the_first_audits_and_three_times_in_six() -> None:
    named = [*chain(*REPEATED), *FORMULAS]
    assert set(named) < CHECKS.keys() and len(set(named)) == len(named)
    assert len(in_turn(list(CHECKS.values()), 1, of_step=False)) == sum(not one.of_step for one in CHECKS.values())
    for check in CHECKS.values():
        turns = [number for number in range(1, 7) if takes_turn(check, number)]
        assert turns[:2] == [1, 2] and (len(turns) >= 3 or check.name in FORMULAS), check.name
        rests = check.name in FORMULAS
        assert rests or all(any(takes_turn(check, at + more) for more in range(3)) for at in range(1, 200)), check.name


def test_what_looks_at_one_rollout_alone_looks_at_every_one() -> None:
    always = [CHECKS[name] for name in ("trained_tokens", "step_gradient", "optimizer_rule", "logged_metrics")]
    assert all(takes_turn(check, number) for check in always for number in range(1, 50))
