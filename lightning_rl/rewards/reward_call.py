"""Calling conventions of reward functions.

Source: the ``reward_funcs`` of TRL's GRPOTrainer, whose functions run unchanged.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_rl.samples import Rows
from lightning_rl.utils.naming import REWARD_ARGUMENTS, in_words, nearest

Reward = Callable[..., Any]
"""``reward(prompts, completions, *, completion_ids, **columns) -> list[float | None]``, or a coroutine function.

None means that the reward does not apply to the row.
"""

EXTRAS = ("trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class CallStyle:
    """Calling convention of one reward function.

    Args:
        by_keyword: Pass ``prompts`` and ``completions`` by keyword, as in TRL, rather than by position.
        extras: Names in :data:`EXTRAS` that the function takes.
    """

    by_keyword: bool = False
    extras: frozenset[str] = frozenset()

    @staticmethod
    def of(name: str, function: Reward, columns: Sequence[str]) -> "CallStyle":
        """Return the calling convention that a function's signature asks for.

        A function with a parameter named like an argument or a column gets every argument by keyword. A function whose
        positional parameters have other names gets prompts and completions by position.

        Raises:
            TypeError: If the signature is not that of a reward.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some built-in functions have no signature
            return CallStyle()
        extras = frozenset(key for key in EXTRAS if takes(function, key))
        rest = {"completion_ids": [], **dict.fromkeys(columns), **dict.fromkeys(extras)}
        by_keyword = _names_any(signature, {*REWARD_ARGUMENTS, *columns})
        try:
            if by_keyword:
                signature.bind(prompts=[], completions=[], **rest)
            else:
                signature.bind([], [], **rest)
        except TypeError as error:
            missing = [
                key
                for key in _parameters_to_give(signature, by_keyword=by_keyword)
                if key not in {"prompts", "completions", *rest}
            ]
            cure = (
                f": {error}"
                if not missing
                else (
                    f", which needs {in_words(missing)}: use the names of columns, or rename a "
                    f'column of the data, as in columns={{"{missing[0]}": '
                    f"{nearest(missing[0], columns) or '...'}}}"
                )
            )
            if "solution_str" in signature.parameters:
                cure = f": wrap a reward function of verl, as in VerlReward(compute_score={name})"
            raise TypeError(
                f"expected reward {name} to accept (prompts, completions, *, completion_ids, **columns) with the "
                f"columns {sorted(columns)}, got {name}{signature}{cure}"
            ) from error
        return CallStyle(by_keyword=by_keyword, extras=extras)

    def arguments(self, rows: Rows, extras: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments for some rows, with the extras that the function takes."""
        keywords = {"completion_ids": rows.completion_ids, **rows.columns}
        keywords |= {name: value for name, value in extras.items() if name in self.extras}
        if self.by_keyword:
            return (), {"prompts": rows.prompts, "completions": rows.completions, **keywords}
        return (rows.prompts, rows.completions), keywords


def _names_any(signature: inspect.Signature, known: Collection[str]) -> bool:
    """Return True if a positional parameter has a known name, or if there are only keyword parameters."""
    parameters = signature.parameters.values()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        return False
    placed = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if placed:
        return any(name in known for name in placed)
    return all(p.kind is not p.VAR_POSITIONAL for p in parameters)


def _parameters_to_give(signature: inspect.Signature, *, by_keyword: bool) -> list[str]:
    """Return the required parameters, without the two that are passed by position."""
    fillable = [p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    placed = [p.name for p in fillable if p.kind is p.POSITIONAL_OR_KEYWORD][: 0 if by_keyword else 2]
    return [p.name for p in fillable if p.default is p.empty and p.name not in placed]


def takes(function: Reward, extra: str) -> bool:
    """Return True if a function takes an entry of :data:`EXTRAS`, by name or by ``**kwargs``."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False
    return extra in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def completion_form(prompt: Any, text: Any) -> Any:
    """Return a completion in the form of its prompt: chat messages if the prompt is chat messages, else the text.

    The messages of a conversation, up to the last answer, stay as they are for a chat.

    After an answer at the end of the prompt, which the policy continues, the message is the whole answer.

    Example:
        >>> completion_form("2 + 2?", "4"), completion_form([{"role": "user", "content": "2 + 2?"}], "4")
        ('4', [{'role': 'assistant', 'content': '4'}])
    """
    chat = isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt)
    if chat and all(isinstance(message, Mapping) for message in prompt):
        if not isinstance(text, str):
            return text
        begun = prompt[-1].get("content") if prompt[-1].get("role") == "assistant" else None
        return [{"role": "assistant", "content": f"{begun or ''}{text}"}]
    return text if isinstance(text, str) else text[-1]["content"]
