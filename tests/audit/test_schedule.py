"""Schedule: no check waits long, and checks of samples run at every audit."""

from itertools import chain

import pytest
from kit.support import fit, tiny_module, tiny_prompts
from typing_extensions import override

from lightning_rl.audit import SignalAudit
from lightning_rl.audit.checks import CHECKS
from lightning_rl.audit.schedule import FORMULAS, REPEATED, in_turn, takes_turn
from lightning_rl.corrections import StepTrace


@pytest.mark.parametrize(("every", "audits"), [(1, 7), (2, 4), (3, 3), (10, 3)])
def test_every_check_looks_at_the_first_audits_and_once_in_a_round(every: int, audits: int) -> None:
    named = [*chain(*REPEATED), *FORMULAS]
    assert set(named) < CHECKS.keys() and len(set(named)) == len(named)
    first = in_turn(list(CHECKS.values()), 1, every, of_step=False)
    assert len(first) == sum(not one.of_step for one in CHECKS.values())
    for check in CHECKS.values():
        turns = [number for number in range(1, 7) if takes_turn(check, number, every)]
        assert turns[:2] == [1, 2] and (len(turns) >= 3 or check.name in FORMULAS), check.name
        rests = check.name in FORMULAS
        assert rests or all(
            any(takes_turn(check, at + more, every) for more in range(audits)) for at in range(1, 200)
        ), check.name


def test_what_was_sampled_in_one_rollout_is_looked_at_in_every_one() -> None:
    always = [CHECKS[name] for name in ("trained_tokens", "sample_likelihood", "quiet_hooks", "raw_fields")]
    assert all(takes_turn(check, number, 1) for check in always for number in range(1, 50))


def test_steps_are_traced_in_the_rollouts_whose_checks_read_them() -> None:
    class Traced(SignalAudit):
        @override
        def observe_step(self, trace: StepTrace) -> None:
            numbers.add(trace.rollout_number + 1)
            super().observe_step(trace)

    numbers = set[int]()
    fit(tiny_module(), callbacks=[Traced(1, "raise")], data=tiny_prompts(9 * 4))
    assert numbers == {number for number in range(1, 10) if takes_turn(CHECKS["step_gradient"], number, 1)}
