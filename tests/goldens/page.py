"""``docs/parity.md``, written from the tables in code and the cases that they cover."""

from collections import Counter
from collections.abc import Iterable, Sequence

from goldens.registry import NOT_COMPARED
from goldens.rules import RULES
from goldens.verdict import Status, Verdict

TEXT = """\
# Parity with other systems

`tests/data/goldens` and `tests/data/goldens_more` hold recorded calls of AReaL, NeMo-RL, OpenRLHF, open-instruct,
prime-rl, SkyRL, slime, TRL and verl. `tests/goldens` replays each of them with our functions, losses and corrections,
and compares values and gradients. A parameter that a replay neither reads nor may ignore makes its case "not offered",
never a comparison of two different things. This page is written by
`python -m tests.goldens tests/data/goldens tests/data/goldens_more --page > docs/parity.md`; a test compares it with
the code. Which system has what is one table: [algorithms](algorithms.md).

One rule for extreme log-ratios: ours are clamped to +-20 before they become a ratio; where a peer has another bound, or
none, ours is asked for with that one, so that the same thing is compared.

{totals}

## Where we differ on purpose

Each rule predicts, without the library, which positions differ and what our value is there. All others have to match.

{rules}

## What we do not offer

{absent}

## What is not compared

{skipped}
"""


def page(verdicts: Sequence[Verdict]) -> str:
    """The whole page."""
    status = Counter(one.status for one in verdicts)
    ruled = Counter(one.detail for one in verdicts if one.status is Status.RULE)
    absent = Counter((one.case.algorithm, one.detail) for one in verdicts if one.status is Status.NOT_OFFERED)
    return TEXT.format(
        totals=_table(("Cases", "Number"), [(str(one), status[one]) for one in Status]),
        rules=_table(
            ("What we do", "What others do, and why we do not", "Algorithms", "Cases"),
            [(rule.name, rule.reason, ", ".join(rule.algorithms), ruled[rule.name]) for rule in RULES],
        ),
        absent=_table(
            ("Algorithm", "Reason", "Cases"),
            [(name, reason, number) for (name, reason), number in sorted(absent.items())],
        ),
        skipped=_table(("Field", "Reason"), [(f"`{field}`", reason) for field, reason in NOT_COMPARED.items()]),
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)
