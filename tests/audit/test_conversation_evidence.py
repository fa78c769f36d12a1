"""Conversations: limits of requests, and summaries of reward calls."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.evidence import evidence_of
from kit.support import tiny_policy

from lightning_rl import FinishReason, RLLightningModule, SamplingParams
from lightning_rl.advantages import Estimator
from lightning_rl.audit import CHECKS
from lightning_rl.audit.conversation_evidence import AuditedConversation, judged_otherwise
from lightning_rl.audit.evidence import Evidence
from lightning_rl.audit.facts import RunFacts
from lightning_rl.environments import ConversationLimits
from lightning_rl.generation import Completion, Request
from lightning_rl.rollout import segments_of

FACTS = RunFacts(limits=ConversationLimits(turns=3, turn_tokens=4, length=20), max_new_tokens=10)


def asked(*turns: tuple[int, int, int]) -> list[tuple[Request, Completion]]:
    """Return turns from the number of prefix tokens, the token limit and the number of sampled tokens."""
    return [
        (
            Request(
                prefix_ids=(1,) * prefix,
                sample_id=5,
                seed=0,
                sampling=SamplingParams(max_new_tokens=room, eos_token_ids=(9,)),
                turn=turn,
            ),
            Completion(token_ids=(2,) * drawn, logprobs=None, version=0, finish=FinishReason.STOP),
        )
        for turn, (prefix, room, drawn) in enumerate(turns)
    ]


def limits(*turns: tuple[int, int, int], **facts: Any) -> list[str]:
    evidence = replace(evidence_of(), batches=[asked(*turns)], facts=replace(FACTS, **facts))
    return [finding.expected.partition(" of ")[0] for finding in CHECKS["turn_limits"](evidence)]


@pytest.mark.parametrize(
    "turns",
    [
        [(3, 4, 4), (9, 4, 4), (15, 2, 2)],  # the turn, the turn, the rest of ten
        [(3, 4, 1), (18, 2, 2)],  # the context
        [(3, 4, 4)],
    ],
)
def test_a_turn_that_may_draw_what_is_left_is_silent(turns: Any) -> None:
    assert limits(*turns) == []


def test_rewards_score_the_last_answer_of_a_conversation_that_ended() -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    conversation = AuditedConversation(5, 1, "environment", {}, asked((3, 4, 2)), said, 1.0, (2, 2), FinishReason.STOP)
    whole, failed = conversation._replace(judged=(2,)), conversation._replace(judged=(), finish=FinishReason.FAILED)
    assert judged_otherwise([conversation, whole, failed, conversation._replace(turns=[])]) == [5]
    (finding,) = CHECKS["told_rewards"](replace(evidence_of(), judged_otherwise=[5]))
    assert (finding.observed, list(finding.samples)) == ("others in 1 conversations", [5])


def test_versions_of_tokens_that_nobody_drew_are_no_engines_doing() -> None:
    evidence = evidence_of()
    drawn = evidence.rollout.action_mask.clone()
    drawn[0, 1] = False  # an environment token
    rollout = evidence.rollout.replace(action_mask=drawn, valid_tokens=drawn)
    stray = replace(evidence, rollout=rollout)
    assert [finding.culprit for finding in CHECKS["versions"](stray)] == ["stage generate"]
    late = replace(evidence, number=3)
    assert [finding.culprit for finding in CHECKS["versions"](late)] == ["engine none"]


def with_words(evidence: Evidence, estimator: Estimator) -> Evidence:
    """Return responses whose third token is an environment token."""
    rollout = evidence.rollout
    drawn = rollout.action_mask.clone()
    drawn[:, 2] = False
    turns = drawn.long() * (1 + (torch.arange(rollout.width) > 2))
    rollout = rollout.replace(
        action_mask=drawn, valid_tokens=drawn, segments=segments_of(turns, rollout.response_lengths)
    )
    algorithm = evidence.algorithm.replace(advantages=estimator)
    return replace(evidence, rollout=rollout, groups=rollout, rows=rollout, algorithm=algorithm)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"])
def test_the_librarys_estimators_step_over_what_the_policy_drew(name: str) -> None:
    estimator = RLLightningModule(tiny_policy, lambda **_: [], advantages=name).algorithm.advantages
    assert CHECKS["silent_environments"](with_words(evidence_of(), estimator)) == []
