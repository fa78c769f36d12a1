"""Programs that call the policy: every call is in the tree of its sample, however a harness changes its history."""

from collections.abc import Mapping
from typing import Any

import pytest
from environments.templates import FAMILIES, tokenizer_of
from kit.harnesses import (
    HARNESSES,
    LOOK,
    REFUSED,
    Client,
    answers_of,
    check_tree,
    fake,
    harness_rows,
    opened,
    random_policy,
    run_harness,
    user,
)

from lightning_rl.environments import Program, converse
from lightning_rl.environments.program import PolicyEndpoint

NO_SYSTEM = {"gemma-3", "mistral"}  # whose templates raise at a system message


@pytest.mark.parametrize("policy", [fake, pytest.param(random_policy, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FAMILIES)
def test_no_context_of_a_harness_is_lost(name: str, policy: Any) -> None:
    REFUSED.clear()
    conversations = opened(name, Program(run_harness, timeout=60), harness_rows(name))
    converse(conversations, policy(name), logprobs=True)
    samples = dict(zip(HARNESSES, map(check_tree, conversations), strict=True))
    assert set(REFUSED) == ({f"system {name}"} if name in NO_SYSTEM else set())
    for harness, sample in samples.items():
        assert sample.environment_reward == 1.0 or (harness == "system" and name in NO_SYSTEM)
        if harness in ("append", "picture", "streaming"):
            assert len(sample.branches()) == 1 and sample.metrics["rewritten"] == 0


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "gpt-oss", "deepseek-r1"])
def test_an_answer_without_its_thoughts_is_another_context_and_with_them_the_same(name: str) -> None:
    thought = next(ids for ids in answers_of(name)[0] if "hm" in tokenizer_of(name).decode(ids))
    for harness, contexts in (("append", 1), ("stripped", 4)):
        rows = [row for row in harness_rows(name) if row["harness"] == harness]
        conversations = opened(name, Program(run_harness), rows)
        converse(conversations, fake(name, lambda _: thought))
        assert len(check_tree(conversations[0]).branches()) == contexts
        history = check_tree(conversations[0]).messages
        assert all(m.get("reasoning_content") == "hm 0" for m in history[-1:] if m["role"] == "assistant")


@pytest.mark.parametrize("policy", [fake, random_policy])
@pytest.mark.parametrize("name", ["qwen2.5", "gpt-oss"])
def test_results_do_not_depend_on_timing(name: str, policy: Any) -> None:
    found, engine = [], policy(name)
    rows = [row for row in harness_rows(name, pause=0.02) if row["harness"] in ("parallel", "branching")] * 3
    for _ in range(4):
        conversations = opened(name, Program(run_harness), rows)
        samples = converse(conversations, engine)
        calls = [[(r.prefix_ids, r.seed, r.turn, c.token_ids) for r, c in one.pairs] for one in conversations]
        trees = [[(s.token_ids, s.parent, s.sampled, s.reward) for s in sample.segments] for sample in samples]
        found.append((calls, trees, [(s.messages, s.opening, s.finish, s.metrics) for s in samples]))
        assert all(check_tree(one).environment_reward == 1.0 for one in conversations)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral"])
def test_a_tool_call_that_is_cut_off_reaches_the_program_as_text(name: str) -> None:
    cut = answers_of(name)[1][0][:-4]

    def run(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
        messages = [user("one")]
        for _ in range(2):
            answer = Client(model)(messages, [LOOK])
            messages += [answer, user("two")]
            assert "look" in answer["content"] and "tool_calls" not in answer
        return 1.0

    conversations = opened(name, Program(run), [{"prompt": "one"}], turn_tokens=100)
    converse(conversations, fake(name, lambda _: cut))
    sample = check_tree(conversations[0])
    assert sample.environment_reward == 1.0 and len(sample.branches()) == 1, sample.failure
