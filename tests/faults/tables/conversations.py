"""Faults in conversations: tokens, masks and rewards lost between turns, and environments that mix up samples."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from kit.chats import (
    CHAT,
    COLOURS,
    TOOLS,
    BriefPartner,
    GonePartner,
    Partner,
    PartnersThatBreak,
    chat_prompts,
    last_answer,
    said_by_policy,
)
from typing_extensions import override

import lightning_rl.advantages.gae
import lightning_rl.environments.conversation
import lightning_rl.generation.engine
import lightning_rl.rollouts.collector
import lightning_rl.run.training
from faults import talks
from faults.fault import Fault
from faults.parts import Altering
from faults.patches import after, change_rows
from faults.tables.logs import in_rollout
from faults.talks import around, figures
from lightning_rl import GAE, Rollout, Stat
from lightning_rl.advantages import Advantages, Estimator, RewardSignal
from lightning_rl.callbacks import NoEOSMask, OverlongPenalty
from lightning_rl.environments import (
    Action,
    Bridge,
    Conversation,
    Message,
    MessageEnvironment,
    StepResult,
    ToolEnvironment,
)
from lightning_rl.environments.run_environments import Environments
from lightning_rl.generation import Request
from lightning_rl.samples import Trajectory

DRAW = "generate|conversation|turn"
ASKED = "generate|conversation|turn|request|prefix"
BETWEEN = "generate|conversation|turn|bridge|template"
CALLS = "tool|ToolEnvironment|conversation|turn|call"
SEEDS = "seed|generate|conversation|turn"


# Environments of a user.


class OnePartner(Partner):
    """One object for all conversations."""

    made: ClassVar[list["OnePartner"]] = []

    def __new__(cls, **_: Any) -> "OnePartner":
        """Return the single object."""
        if not cls.made:
            cls.made.append(super().__new__(cls))
        return cls.made[0]


class KeptPartner(Partner):
    """Rewards new words, from a set shared by all conversations."""

    heard: ClassVar[set[str]] = set()

    @override
    def step(self, answer: Action) -> StepResult:
        said = super().step(answer)
        new = set(answer.text.split()) - self.heard
        self.heard.update(new)
        return replace(said, reward=float(len(new)))


class DicedPartner(Partner):
    """Uses another color for each sample of a prompt, ignoring the seed."""

    opened: ClassVar[Any] = itertools.count()

    @override
    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        said = super().reset(row, seed)
        self.colour = COLOURS[next(self.opened) % 3]
        return said


class ImpatientPartner(Partner):
    """Pays less to later answers in a round, by the number of answers since the first turn."""

    answered: ClassVar[Any] = itertools.count()

    @override
    def step(self, answer: Action) -> StepResult:
        said = super().step(answer)
        return replace(said, reward=(said.reward or 0.0) - 0.01 * (next(self.answered) % 16))


# Estimators.


class PerTurn(Estimator):
    """Centers over the turns of a group, so conversations with many turns count more."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        assert signal.turns is not None
        weight = signal.turns.amax(-1).to(signal.scores.dtype) * signal.rewarded
        mean = torch.zeros_like(signal.scores)
        for group in signal.groups.unique():
            rows = signal.groups == group
            mean[rows] = (signal.scores * weight)[rows].sum() / weight[rows].sum().clamp(min=1)
        return Advantages(signal.spread_out(torch.where(signal.rewarded, signal.scores - mean, 0.0)))


class OverHoles(Estimator):
    """Steps over every token of a response, environment tokens included."""

    reads = ("values",)
    per_token: ClassVar[bool] = True

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        values, valid = signal.values, signal.valid_tokens
        assert values is not None
        raw = talks.over_holes(signal.shaped, torch.where(valid, values, 0.0), valid, gamma=0.9)
        return Advantages(raw, torch.where(valid, raw + values, 0.0))


class RewardOnHoles(Estimator):
    """Spreads a reward over the whole response, and loses the share of environment tokens."""

    @override
    def __call__(self, signal: RewardSignal) -> Advantages:
        mean = torch.stack([signal.scores[signal.groups == group].mean() for group in signal.groups])
        lengths = signal.valid_tokens.flip(-1).long().cumsum(-1).gt(0).sum(-1)
        drawn = signal.valid_tokens.sum(-1)
        share = drawn / lengths.clamp(min=1)
        return Advantages(signal.spread_out(torch.where(signal.rewarded, (signal.scores - mean) * share, 0.0)))


# Requests and figures.


def forgetful(request: Request) -> Request:
    return replace(request, prefix_ids=request.prefix_ids[-8:]) if request.turn else request


def hotter_later(request: Request) -> Request:
    return replace(request, sampling=replace(request.sampling, temperature=0.5)) if request.turn else request


def over_the_drawn(rollout: Rollout, policy: Any, plan_of: Any) -> Stat:
    return Stat.of(rollout.require("rollout_logprobs"), rollout.valid_tokens)


def logged(name: str, value: Any) -> Any:
    """Change a metric of conversations: a function from all metrics by name to its values."""
    change = figures(lambda found: {name: value(found)} if found.get("env/turns") else {})
    return after(lightning_rl.rollouts.collector, "metrics_of", change)


def first_environment(self: Environments, prompt: Any) -> str:
    return next(iter(self.factories))


def chat(name: str, culprit: str, *, options: Mapping[str, Any] | None = None, **given: Any) -> Fault:
    """Return a fault in conversations with a partner."""
    return Fault(name, culprit, options={**CHAT, **(options or {})}, data=given.pop("data", chat_prompts), **given)


def tools(name: str, culprit: str, *patches: Any, **options: Any) -> Fault:
    """Return a fault in conversations with a tool."""
    return Fault(name, culprit, options={**TOOLS, **options}, data=chat_prompts, patches=patches)


def rows(name: str, change: Any, culprit: str = DRAW, **given: Any) -> Fault:
    """Return a fault in sampled rows."""
    return chat(name, culprit, patches=[change_rows(change)], **given)


def said(name: str, method: str, change: Any, culprit: str = DRAW, **given: Any) -> Fault:
    """Return a fault between the turns of a conversation."""
    return chat(name, culprit, patches=[around(Conversation, method, change)], **given)


def bridged(name: str, change: Any, **given: Any) -> Fault:
    """Return a fault in the tokens between two answers."""
    return chat(name, BETWEEN, patches=[around(Bridge, "after", change)], **given)


def partner(kind: type[Partner]) -> Fault:
    """Return a fault of a user's environment."""
    what = (kind.__doc__ or "").split(",")[0].split(".")[0]
    return chat(
        f"a partner that {what[0].lower()}{what[1:]}",
        kind.__name__,
        options={"environment": kind},
    )


GONE: dict[str, Any] = {"options": {"environment": GonePartner}}
AGAIN: dict[str, Any] = {"fresh": {"environment": partial(PartnersThatBreak, 5)}}
LATE: dict[str, Any] = {"options": {"max_turns": 6, "max_new_tokens": 8}}
PPO: dict[str, Any] = {"critic": "shared"}


FAULTS: tuple[Fault, ...] = (
    # Tokens.
    said("an answer decoded and encoded again", "receive", talks.encoded_again),
    said("a prefix whose answers are encoded again", "_ask", talks.rendered_prefix, ASKED),
    said("a prefix without the token that ended an answer", "_ask", talks.prefix_without_ends, ASKED),
    said("the token that ended an answer stripped", "receive", talks.without_ends),
    bridged("a newline missing behind a closing token", talks.without_newline),
    bridged("a truncated answer that is not closed", talks.never_closing),
    bridged("an answer that is closed twice", talks.always_closing),
    bridged("what an environment says cut to two words", talks.two_words_each),
    chat(
        "control tokens in what an environment says",
        BETWEEN,
        options={"environment": partial(Partner, hostile=True)},
        patches=[patch.object(Bridge, "_ids", talks.never_sanitized), patch.object(Bridge, "_count", lambda *_: 0)],
    ),
    chat(
        "an observation that no answer can follow appended",
        DRAW,
        patches=[around(Conversation, "_take", talks.keeping_reply), around(Conversation, "_stop", talks.appended_cut)],
        **LATE,
    ),
    rows("padding between two turns", talks.padded_inside),
    chat(
        "the last turn of a conversation lost",
        DRAW,
        patches=[around(lightning_rl.rollouts.collector, "lay_out", talks.last_turn_lost)],
    ),
    # Masks.
    rows("a newline behind a closing token trained", talks.training_closing),
    rows("what an environment says trained", talks.training_all),
    rows("a mask shifted by one", talks.shifted_mask),
    rows("the last turn missing in the mask", talks.without_last_turn),
    rows("every turn numbered 1", talks.one_turn_each),
    # Log-probabilities, versions.
    rows("log-probabilities shifted by what an environment says", talks.shifted_logprobs),
    rows("a version for what an environment says", talks.versions_everywhere),
    # Rewards.
    rows("a turn's reward on a masked token", talks.rewards_behind_turns),
    said("rewards of turns before the last dropped", "_end", talks.last_reward_alone, f"{DRAW}|reward"),
    chat(
        "a reward that judges a whole row",
        "reward|answer|completion|generate",
        options={"rewards": last_answer},
        patches=[patch.object(Trajectory, "answer", property(talks.whole_row))],
    ),
    chat(
        "what the environment gave the row above",
        "reward|generate",
        patches=[after(lightning_rl.rollouts.collector, "reward_columns", talks.rewards_of_the_row_above)],
    ),
    chat(
        "conversations that rewards see without their last message",
        "conversation|reward|generate",
        options={"rewards": said_by_policy},
        patches=[after(lightning_rl.rollouts.collector, "reward_columns", talks.without_last_message)],
    ),
    chat("statistics over turns", "PerTurn", options={"advantages": PerTurn()}),
    chat(
        "an estimator that steps over what an environment says", "OverHoles", options={**PPO, "advantages": OverHoles()}
    ),
    chat(
        "the library's GAE with holes for time steps",
        "GAE|estimator|signal",
        options={**PPO, "advantages": GAE(gamma=0.9, whitened=False)},
        patches=[patch.object(lightning_rl.advantages.gae, "gae", talks.over_holes)],
    ),
    chat("a reward spread over what an environment says", "RewardOnHoles", options={"advantages": RewardOnHoles()}),
    # Environments that fail.
    said("an environment that failed rewarded 0", "_end", talks.failed_as_zero, f"{DRAW}|failed|GonePartner", **GONE),
    chat(
        "an environment that failed counted in its group",
        f"{DRAW}|reward|rewarded|failed",
        patches=[after(lightning_rl.run.training, "exclude_rows", talks.counting_failed)],
        **GONE,
    ),
    rows("an environment that failed trained", talks.training_failed, f"{DRAW}|trained|failed", **GONE),
    said("a second try with other seeds", "_fail", talks.other_seeds, SEEDS, **AGAIN),
    said(
        "a second try that keeps what the first one earned", "_forget", talks.keeping_rewards, f"{DRAW}|reward", **AGAIN
    ),
    # Assignment of environments.
    said("two conversations told each other's words", "_take", talks.exchanged),
    said("an environment asked twice", "receive", talks.stepping_twice),
    chat(
        "two answers exchanged between conversations",
        f"{DRAW}|engine|Engine",
        patches=[around(lightning_rl.generation.engine, "give_all", talks.two_answers_exchanged)],
    ),
    chat(
        "an environment opened with the row of the sample before",
        f"{DRAW}|row|environment",
        patches=[after(Environments, "open", talks.row_of_the_sample_before)],
    ),
    chat(
        "another seed of the environment for each sample of a prompt",
        SEEDS,
        patches=[after(Environments, "open", talks.seeded_by_sample)],
    ),
    chat(
        "the first environment for every row",
        f"{DRAW}|environment|column",
        options={"environment": {"partner": Partner, "brief": BriefPartner}},
        data=partial(chat_prompts, environment=["partner", "brief"]),
        patches=[patch.object(Environments, "name_for", first_environment)],
    ),
    *map(partner, (OnePartner, KeptPartner, DicedPartner, ImpatientPartner)),
    # Seeds and limits.
    chat(
        "one seed for all turns of a sample",
        SEEDS,
        patches=[patch.object(lightning_rl.environments.conversation, "turn_seed", lambda first, _: first)],
    ),
    chat("an engine that forgets the turns before", "Altering", fresh={"engine": lambda: Altering(request=forgetful)}),
    chat(
        "an engine that draws later turns at another temperature",
        "Altering",
        fresh={"engine": lambda: Altering(request=hotter_later)},
    ),
    said("the limit of turns called an end", "_stop", talks.turns_as_stop, callbacks=lambda: [NoEOSMask()]),
    said("a turn more than the limit", "__init__", talks.a_turn_more),
    said(
        "the environment's words counted against the policy's",
        "_room",
        talks.room_of_all_words,
        ASKED,
        options={"max_new_tokens": 24, "max_turn_tokens": 20},
    ),
    said("the budget of a conversation for each turn", "_room", talks.room_for_whole_budget, ASKED, **LATE),
    # Tools.
    tools("calls of a cut answer made", CALLS, around(MessageEnvironment, "step", talks.cut_as_whole)),
    tools("results of parallel calls dropped", CALLS, around(ToolEnvironment, "step", talks.first_result_alone)),
    tools("results of parallel calls exchanged", CALLS, around(ToolEnvironment, "step", talks.results_exchanged)),
    tools(
        "a policy that is told of no tools",
        BETWEEN,
        around(Bridge, "encode", lambda encode, bridge, messages, *_: encode(bridge, messages)),
    ),
    chat(
        "conversations that begin without the head of an answer",
        BETWEEN,
        patches=[around(Bridge, "encode", lambda encode, *given: encode(*given)[:-2])],
    ),
    tools("results of parallel calls rendered one by one", BETWEEN, around(Bridge, "after", talks.one_by_one)),
    tools("what a tool returns trained", DRAW, change_rows(talks.training_all)),
    # Figures.
    chat(
        "lengths that count what environments say",
        "length/mean",
        patches=[in_rollout("length/mean", lambda rollout: Stat.of(rollout.response_lengths, rollout.real))],
    ),
    chat(
        "a length penalty that counts what environments say",
        "length|overlong",
        callbacks=lambda: [OverlongPenalty(10, 8)],
        patches=[patch.object(Rollout, "sampled_lengths", property(lambda self: self.response_lengths))],
    ),
    chat(
        "environments that failed not logged",
        "env/failed",
        patches=[logged("env/failed", lambda found: [0.0 for _ in found["env/failed"]])],
        **GONE,
    ),
    chat(
        "conversations cut by turns logged as cut by tokens",
        "env/cut_by",
        patches=[logged("env/cut_by_tokens", lambda found: found["env/cut_by_turns"])],
    ),
    tools(
        "tool calls logged by the turn",
        "env/tool_calls",
        logged(
            "env/tool_calls",
            lambda found: [n / turns for n, turns in zip(found["env/tool_calls"], found["env/turns"], strict=True)],
        ),
    ),
    chat(
        "the policy's own log-probability logged for the environment's",
        "env/logprob",
        patches=[patch.object(lightning_rl.run.training, "environment_logprob", over_the_drawn)],
    ),
)
