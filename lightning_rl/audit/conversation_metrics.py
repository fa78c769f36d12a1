"""Figures of conversations: what is logged of them, counted once more from what was drawn and from what rewards saw."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from lightning_rl.audit.conversation_evidence import Talk
from lightning_rl.audit.forwards import policy_outputs
from lightning_rl.audit.recomputed_metrics import population
from lightning_rl.corrections import Stat
from lightning_rl.environments import ToolEnvironment
from lightning_rl.environments.outcome import DEFAULT
from lightning_rl.environments.run_environments import Factory
from lightning_rl.module import RLLightningModule
from lightning_rl.rollout import TURNS, FinishReason, Rollout

MAX_TOKENS = 16_384  # of the rows in which the environment's words are scored, beyond which they are not


def talk_figures(talks: Sequence[Talk], factories: Mapping[str, Factory]) -> dict[str, Stat]:
    """The figures of a rollout's conversations, by the names that they are logged by.

    Args:
        talks: all conversations of the rollout, those that failed among them.
        factories: of the environments, by name.
    """
    names, figures = {talk.environment for talk in talks}, dict[str, Stat]()
    for name in names & factories.keys():
        mine, head = (
            [talk for talk in talks if talk.environment == name],
            "env" if names == {DEFAULT} else f"env/{name}",
        )
        values = {f"{head}/{figure}": [float(count(talk)) for talk in mine] for figure, count in COUNTS.items()}
        if _has_tools_alone(factories[name]) and all(talk.is_over for talk in mine):
            values[f"{head}/tool_calls"] = [float(_calls(talk)) for talk in mine]
        if rewards := [talk.reward for talk in mine if talk.reward is not None]:
            values[f"{head}/reward"] = rewards
        figures |= {figure: population(torch.tensor(one, dtype=torch.float64)) for figure, one in values.items()}
    return figures


def _tokens(talk: Talk) -> int:
    """How many tokens stand between the answers of a conversation; of a rewritten context, all of them."""
    return sum(
        len(following.prefix_ids)
        - (0 if turn in talk.rewrites else len(request.prefix_ids) + len(completion.token_ids))
        for turn, ((request, completion), (following, _)) in enumerate(pairwise(talk.turns), 2)
    )


def _calls(talk: Talk) -> int:
    return sum(len(talk.messages[place].get("tool_calls") or ()) for place in talk.places)


COUNTS: Mapping[str, Callable[[Talk], int]] = {
    "turns": lambda talk: len(talk.turns),
    "tokens": _tokens,
    "failed": lambda talk: talk.finish is FinishReason.FAILED,
    "cut_by_turns": lambda talk: talk.finish is FinishReason.TURNS,
    "cut_by_tokens": lambda talk: talk.finish is FinishReason.LENGTH,
}
"""What every conversation counts, from what is known of it."""


def _has_tools_alone(factory: Factory) -> bool:
    """Whether nobody else gives figures of calls."""
    return isinstance(factory, partial) and factory.func is ToolEnvironment


def words_logprob(module: RLLightningModule, rollout: Rollout) -> float | None:
    """The mean log-probability of what environments say in the first row of each group, in nats; None if they say
    nothing there, or too much. Every rank calls it.
    """
    groups = rollout.groups.tolist()
    first = torch.tensor([groups.index(group) for group in dict.fromkeys(groups)], dtype=torch.int64)
    rows = rollout.select(first.to(rollout.groups.device))
    inside = torch.arange(rows.width, device=rows.groups.device) < rows.response_lengths[:, None]
    said = inside & ~rows.action_mask & (rows.token_extras[TURNS] >= 0)  # no context that is rewritten
    tokens = int((rows.prompt_lengths + rows.response_lengths).sum())
    if max(module.parallel.collectives.objects(tokens)) > MAX_TOKENS:
        return None
    logprobs = policy_outputs(module, rows.replace(valid_tokens=said, trained=rows.real)).logprobs
    return float(logprobs[said].double().mean()) if bool(said.any()) else None
