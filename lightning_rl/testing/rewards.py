"""The kit for reward functions: generated completions beside each other, in other orders and alone."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from lightning_rl.audit import Finding
from lightning_rl.audit.checks.rewards import others_among
from lightning_rl.audit.recorded import RewardCall
from lightning_rl.rewards import Reward
from lightning_rl.testing.smallest import PropertyError, smallest

MEANINGS = {
    "reward_accepts": "A reward takes any completion, the empty one too: what raises takes its row out of training.",
    "reward_values": "A reward is a list with one finite number, or None, for each completion.",
    "reward_inputs": "A reward edits nothing that it is given: other rewards are given the same lists.",
    "reward_repeats": "A reward says the same of the same completions.",
    "reward_order": "The reward of a completion depends on neither the order of the rows nor on its neighbours.",
}
COMPLETIONS = ("", " ", "4", "4\n", "The answer is 4.", r"\boxed{4}", "a " * 40)


def check_reward(
    reward: Reward, *, prompts: Sequence[Any] = ("What is 2 + 2?", "Say a word."),
    completions: Sequence[str] = COMPLETIONS, **columns: Sequence[Any],
) -> None:  # fmt: skip
    """Checks what would be passed as ``rewards=``, on batches that mix the given examples with arbitrary text.

    Args:
        reward: ``reward(prompts, completions, *, completion_ids, **columns)``.
        prompts: examples of prompts.
        completions: examples of completions, some of which should score differently.
        columns: examples for each column of the data that the reward reads, such as ``answer=["4", "7"]``.

    Raises:
        PropertyError: naming the property that it breaks, with the smallest batch that shows it.
    """
    text = st.one_of(st.sampled_from(list(completions)), st.text(max_size=12))
    row = st.fixed_dictionaries(
        {"prompt": st.sampled_from(list(prompts)), "completion": text}
        | {name: st.sampled_from(list(examples)) for name, examples in columns.items()}
    )
    broken = smallest(st.lists(row, min_size=1, max_size=5), lambda rows, wanted: _found(reward, rows, wanted))
    if broken is not None:
        rows, finding = broken
        name = getattr(reward, "__name__", type(reward).__name__)
        raise PropertyError(f"reward {name}", finding, [str(one) for one in rows], MEANINGS[finding.check])


def _found(reward: Reward, rows: Sequence[Mapping[str, Any]], wanted: str | None = None) -> list[Finding]:
    """The first property that some rows show to be broken, if it is the wanted one."""
    return [one for one in _first(reward, rows) if wanted in (None, one.check)]


def _first(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    given = _Given(rows)
    before = copy.deepcopy(vars(given))
    try:
        said = given.asked(reward)
    except Exception as raised:  # noqa: BLE001  user code: what it raises is the finding
        return [
            _finding(
                "reward_accepts", "values", f"{type(raised).__name__}: {raised}", "return None where it does not apply"
            )
        ]
    if vars(given) != before:
        return [_finding("reward_inputs", "lists as they were", "edits of its arguments", "work on copies")]
    values = list(said) if isinstance(said, Sequence) or hasattr(said, "__iter__") else None
    if values is None or len(values) != len(rows) or not all(_is_value(value) for value in values):
        cure = "return one float or None for each completion, never NaN"
        return [_finding("reward_values", f"{len(rows)} finite numbers or None", f"{said!r}", cure)]
    plain = [None if value is None else float(value) for value in values]
    call = RewardCall("reward", given.ids, plain, 0.0, given.prompts, given.completions, given.columns, reward)
    whole = range(len(rows))
    if others_among(call, whole):
        return [_finding("reward_repeats", "the same values again", "others", "seed or drop its random numbers")]
    for order in (list(whole)[::-1], *([row] for row in whole)):
        if len(rows) > 1 and others_among(call, order):
            cure = "score each row by itself, by its own arguments"
            return [
                _finding("reward_order", "the same value for a completion", f"another one among rows {order}", cure)
            ]
    return []


class _Given:
    """The arguments of a reward."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.prompts = [row["prompt"] for row in rows]
        self.completions: list[str] = [row["completion"] for row in rows]
        self.ids = [[ord(letter) for letter in completion] for completion in self.completions]
        names = [name for name in rows[0] if name not in ("prompt", "completion")]
        self.columns = {name: [row[name] for row in rows] for name in names}

    def asked(self, reward: Callable[..., Any]) -> Any:
        """What the reward says."""
        return reward(self.prompts, self.completions, completion_ids=self.ids, **self.columns)


def _is_value(value: Any) -> bool:
    try:
        return value is None or math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _finding(name: str, expected: str, observed: str, cure: str) -> Finding:
    return Finding(check=name, culprit="the function", expected=expected, observed=observed, cure=cure)
