"""Property checks of reward functions: generated completions in batches, in other orders and alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from hypothesis import strategies as st

from lightning_rl.rewards import Reward, RewardCall
from lightning_rl.rewards.submitted import return_alone
from lightning_rl.rewards.values import InvalidRewardError, values_of
from lightning_rl.testing.properties.reward_repeats import RepeatedCall, repeat_call
from lightning_rl.testing.shrinking import PropertyError, smallest
from lightning_rl.utils.finding import Finding
from lightning_rl.utils.naming import name_of

MEANINGS = {
    "reward_accepts": "A reward accepts any completion, including an empty one: an error drops the row from training.",
    "reward_values": "A reward returns a list with one finite number, or None, for each completion.",
    "reward_inputs": "A reward does not modify its arguments: other rewards get the same lists.",
    "reward_repeats": "A reward returns the same values for the same completions.",
    "reward_order": "The reward of a completion does not depend on the order of the rows or on other rows.",
}
COMPLETIONS = ("", " ", "4", "4\n", "The answer is 4.", r"\boxed{4}", "a " * 40)


def check_reward(
    reward: Reward,
    *,
    prompts: Sequence[Any] = ("What is 2 + 2?", "Say a word."),
    completions: Sequence[str] = COMPLETIONS,
    **columns: Sequence[Any],
) -> None:
    """Check a ``rewards=`` function on batches that mix the given examples with arbitrary text.

    Args:
        reward: Function ``reward(prompts, completions, *, completion_ids, **columns)``.
        prompts: Examples of prompts.
        completions: Examples of completions, some of which should score differently.
        columns: Examples for each column of the data that the reward reads, such as ``answer=["4", "7"]``.

    Raises:
        PropertyError: With the broken property and the smallest batch that shows it.
    """
    text = st.one_of(st.sampled_from(list(completions)), st.text(max_size=12))
    row = st.fixed_dictionaries(
        {"prompt": st.sampled_from(list(prompts)), "completion": text}
        | {name: st.sampled_from(list(examples)) for name, examples in columns.items()}
    )

    def look(rows: Sequence[Mapping[str, Any]], wanted: str | None) -> list[Finding]:
        return [finding for finding in islice(_findings(reward, rows), 1) if wanted in (None, finding.check)]

    broken = smallest(st.lists(row, min_size=1, max_size=5), look)
    if broken is not None:
        rows, finding = broken
        raise PropertyError(f"reward {name_of(reward)}", finding, [str(row) for row in rows], MEANINGS[finding.check])


def _findings(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield findings about broken properties until one makes the next checks meaningless."""
    columns, every = {name: [row[name] for row in rows] for name in rows[0]}, range(len(rows))
    prompts, completions = columns.pop("prompt"), columns.pop("completion")
    ids = [[ord(letter) for letter in completion] for completion in completions]
    call = RewardCall("reward", ids, (), 0.0, prompts, completions, columns, reward)
    orders = [every, every[::-1], *([row] for row in every)]  # in-place sorting changes one of the first two
    repeated, observed = RepeatedCall(), ""
    try:
        call = call._replace(values=values_of(return_alone(call.name, reward, call.rows.copy()), len(rows)))
        repeated = repeat_call(call, orders, lambda: reward)
    except InvalidRewardError as error:
        observed = str(error).partition(", got ")[2]
    except (Exception, SystemExit) as raised:  # noqa: BLE001  an error of user code is a finding
        cure = "return None where it does not apply"
        yield _finding("reward_accepts", "values", f"{type(raised).__name__}: {raised}", cure)
        return
    if repeated.edited:
        yield _finding("reward_inputs", "lists as they were", "edits of its arguments", "work on copies")
    if any(value is not None and not math.isfinite(value) for value in call.values):
        observed = f"{call.values!r}"
    if observed:
        cure = "return one float or None for each completion, never NaN"
        yield _finding("reward_values", f"{len(rows)} finite numbers or None", observed, cure)
    elif repeated.rows and not repeated.repeats:
        yield _finding("reward_repeats", "the same values again", "others", "seed or drop its random numbers")
    elif repeated.rows:
        observed = f"others for rows {list(repeated.rows)} with fewer rows, or in another order"
        cure = "score each row from its own arguments only"
        yield _finding("reward_order", "the same value for a completion", observed, cure)


def _finding(name: str, expected: str, observed: str, cure: str) -> Finding:
    return Finding(check=name, culprit="the function", expected=expected, observed=observed, cure=cure)
