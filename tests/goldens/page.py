"""Section "Parity" of ``docs/evidence.md``, written from the tables in code and the cases that they cover."""

from collections import Counter
from collections.abc import Iterable, Sequence

from goldens.registry import NOT_COMPARED
from goldens.rules import RULES
from goldens.verdict import Status, Verdict

TEXT = """\
## Parity

`tests/data/goldens` and `tests/data/goldens_more` contain recorded calls of AReaL, NeMo-RL, OpenRLHF, open-instruct,
prime-rl, SkyRL, slime, TRL and verl. `tests/goldens` replays each with our functions, losses and corrections, and
compares values and gradients. `make test-goldens` runs it; `python -m tests.goldens tests/data/goldens
tests/data/goldens_more --page` prints this section. Extreme log-ratios are compared with the bound of the other system.
[Algorithms](algorithms.md) lists which system has what.

{totals}

### Intended differences

Each rule predicts, without the library, which positions differ and our value there. All others have to match.

{rules}

### Not offered

{absent}

### Not compared

{skipped}
"""


def page(verdicts: Sequence[Verdict]) -> str:
    """Return the section."""
    status = Counter(one.status for one in verdicts)
    ruled = Counter(one.detail for one in verdicts if one.status is Status.RULE)
    absent = Counter((one.case.algorithm, one.detail) for one in verdicts if one.status is Status.NOT_OFFERED)
    return TEXT.format(
        totals=_table(("Cases", "Number"), [(str(one), status[one]) for one in Status]),
        rules=_table(
            ("Here", "Elsewhere, and why not here", "Algorithms", "Cases"),
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
