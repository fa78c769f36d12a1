"""Invariants of conversations, on valid and on faulty evidence."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from kit.chats import CHAT, chat_prompts
from kit.evidence import evidence_of
from kit.support import callback_of, fit, tiny_module

from lightning_rl import FinishReason, SamplingParams
from lightning_rl.audit import CHECKS, SignalAudit
from lightning_rl.audit.evidence import Evidence
from lightning_rl.generation import Completion, Request, request_seed, turn_seed
from lightning_rl.rollout import TURN_REWARDS, segments_of
from lightning_rl.samples.seeds import call_seed


def pairs_of(
    sample: int, seeds: Sequence[int], numbers: Sequence[int] | None = None
) -> list[tuple[Request, Completion]]:
    sampling = SamplingParams(eos_token_ids=())
    return [
        (
            Request(prefix_ids=(2,) * (turn + 1), sample_id=sample, seed=seed, turn=turn, sampling=sampling),
            Completion(token_ids=(5,), logprobs=torch.zeros(1), finish=FinishReason.STOP, version=0),
        )
        for seed, turn in zip(seeds, numbers or range(len(seeds)), strict=True)
    ]


def test_every_turn_has_the_seed_of_its_run_rollout_sample_and_number() -> None:
    evidence = replace(evidence_of(), number=3)
    evidence = replace(evidence, facts=replace(evidence.facts, seed=7))
    first = request_seed(7, 3, 40)
    cases: dict[str, tuple[Sequence[int], Sequence[int] | None]] = {
        "": ((first, turn_seed(first, 1), turn_seed(first, 2)), None),
        "turns 0, 1, 2, ... of each sample": ((first, turn_seed(first, 2)), (0, 2)),
        "the seed of its sample and turn at every request": ((first, first), None),
        "the seed of its run, rollout and sample at every first request": ((first + 1, turn_seed(first + 1, 1)), None),
    }
    for expected, (seeds, numbers) in cases.items():
        found = CHECKS["turn_order"](replace(evidence, batches=[pairs_of(40, seeds, numbers)]))
        assert [finding.expected for finding in found] == ([expected] if expected else [])
    calls = [call_seed(first, (2,) * (turn + 1), 0) for turn in range(2)]  # of a program
    assert CHECKS["turn_order"](replace(evidence, batches=[pairs_of(40, calls)])) == []
    assert len(CHECKS["turn_order"](replace(evidence, batches=[pairs_of(40, calls[:1] * 2)]))) == 1
    earlier = replace(evidence, number=2, batches=[pairs_of(40, cases[""][0])])
    assert len(CHECKS["turn_order"](earlier)) == 1, "the same request in another rollout has another seed"


def with_turns(evidence: Evidence) -> Evidence:
    """Return a rollout in which every token is a turn."""
    rows = evidence.rollout
    turns = torch.where(rows.action_mask, torch.arange(1, rows.width + 1), 0)
    segments = segments_of(turns, rows.response_lengths)
    rows = rows.replace(segments=segments, token_extras={TURN_REWARDS: torch.zeros(turns.shape)})
    return replace(evidence, rollout=rows, groups=rows, rows=rows)


def test_statistics_that_count_the_rows_of_a_sample_are_found() -> None:
    """The first sample has a second row, which shifts the group mean of an estimator that counts rows."""
    evidence = with_turns(evidence_of())
    rows = evidence.rollout.replace(sample_ids=torch.tensor([0, 0, 2, 3, 4, 5, 6, 7, 8]))
    (found,) = CHECKS["sample_weights"](replace(evidence, rollout=rows, groups=rows, rows=rows))
    assert found.observed == "others with one row per sample" and found.culprit == "estimator GRPO"


def test_rewards_of_turns_in_excluded_rows_give_no_finding() -> None:
    audit = SignalAudit(1, "raise", checks=["turn_rewards"])
    long = callback_of("long", exclude=lambda rollout: rollout.response_lengths > 12)
    trainer = fit(tiny_module(**CHAT), callbacks=[long, audit], data=chat_prompts(), max_steps=2)
    assert trainer.callback_metrics["long/excluded"] > 0
