"""Self-play of programs: opponents that do not train, roles, rewards of single answers, and runs of both kinds."""

import itertools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import urlopen

import pytest
from kit.harnesses import Client, check_tree, fake, family_script, opened, random_policy, user

from lightning_rl import FinishReason
from lightning_rl.environments import Program, ProgramResult, converse
from lightning_rl.environments.program import PolicyEndpoint
from lightning_rl.generation import Request
from lightning_rl.samples import Trajectory

NAME = "qwen2.5"


def duel(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """Play three rounds in which both players see the same first message and move at the same time."""
    ask, players = Client(model, row.get("pause", 0.0)), (model.model, model.opponent)
    first = row["prompt"] if isinstance(row["prompt"], list) else [user(row["prompt"])]
    histories, moves = [[*first], [*first]], list[dict[str, Any]]()
    with ThreadPoolExecutor(2) as executor:
        for _ in range(row.get("rounds", 3)):
            moves = list(executor.map(lambda at: ask(histories[at], model=players[at]), range(2)))
            for at in range(2):
                histories[at] += [moves[at], user(f"the other said {moves[1 - at]['content']}")]
    return float(moves[0]["content"] > moves[1]["content"])


def test_the_opponent_is_the_policy_in_a_context_of_its_own_that_does_not_train() -> None:
    seen = list[Request]()
    script = family_script(NAME)
    (conversation,) = opened(NAME, Program(duel), [{"prompt": "one"}], turns=3)
    converse([conversation], fake(NAME, lambda request: seen.append(request) or script(request)))
    sample, theirs = check_tree(conversation), [request for request in seen if request.role == "opponent"]
    assert len(seen) == 6 and len(theirs) == sample.metrics["turns"] == 3
    assert len({request.seed for request in seen}) == len({request.key for request in seen}) == 6
    assert [(s.sampled, s.role) for s in sample.segments if s.sampled] == [(True, "policy")] * 3
    for before, after in itertools.pairwise(theirs):
        answer = tuple(script(before))
        assert after.prefix_ids[: len(before.prefix_ids) + len(answer)] == (*before.prefix_ids, *answer)


def test_both_models_are_listed() -> None:
    listed = list[Any]()

    def ask(row: Mapping[str, Any], model: PolicyEndpoint) -> None:
        Client(model)([user("one")])
        with urlopen(f"{model.keyed_url}/v1/models", timeout=30) as answer:
            listed.extend(each["id"] for each in json.load(answer)["data"])

    converse(opened(NAME, Program(ask), [{"prompt": "one"}]), fake(NAME))
    assert listed == ["policy", "opponent"]


def test_the_limit_on_turns_holds_for_the_opponent_too() -> None:
    def greedy(row: Mapping[str, Any], model: PolicyEndpoint) -> None:
        ask = Client(model)
        ask([user("one")])
        for number in range(3):
            ask([user(f"one {number}")], model=model.opponent)

    (sample,) = converse(opened(NAME, Program(greedy), [{"prompt": "one"}], turns=2), fake(NAME))
    assert sample.finish == FinishReason.TURNS and sample.metrics["turns"] == 1


def propose_and_solve(row: Mapping[str, Any], model: PolicyEndpoint) -> ProgramResult:
    """Have a problem proposed, and solved four times at once in two turns; reward the answers by their ids."""
    client, rewards = Client(model, row.get("pause", 0.0)), dict[str, float]()

    def ask(messages: Any, role: str) -> tuple[str, dict[str, Any]]:
        answer = json.loads(client.said(messages, model=role))
        return answer["id"], answer["choices"][0]["message"]

    proposal, problem = ask(row["prompt"] if isinstance(row["prompt"], list) else [user(row["prompt"])], "proposer")

    def solve(_: int) -> str:
        messages = [user(f"say {problem['content']}")]
        draft, answer = ask(messages, "solver")
        rewards[draft] = 0.25 * len(answer["content"].split())
        final, answer = ask([*messages, answer, user("?")], "solver")
        rewards[final] = float(len(set(answer["content"].split())))
        return final

    with ThreadPoolExecutor(4) as executor:
        solved = list(executor.map(solve, range(4)))
    rewards[proposal] = sum(rewards[each] for each in solved) / 4
    return ProgramResult(turn_rewards=rewards)


@pytest.mark.parametrize("program", [duel, propose_and_solve])
@pytest.mark.parametrize("policy", [fake, random_policy])
def test_results_of_self_play_do_not_depend_on_timing(program: Any, policy: Any) -> None:
    found, engine = [], policy(NAME)
    for pause in (0.0, 0.02, 0.02):
        conversations = opened(NAME, Program(program), [{"prompt": "one", "pause": pause}] * 3)
        samples = converse(conversations, engine)
        calls = [[(r.prefix_ids, r.seed, r.turn, r.role) for r, _ in one.pairs] for one in conversations]
        trees = [[(s.token_ids, s.parent, s.role, s.reward) for s in sample.segments] for sample in samples]
        found.append((calls, trees, [(s.environment_reward, s.finish, s.metrics) for s in samples]))
        assert all(check_tree(one).failure is None for one in conversations)
    assert all(one == found[0] for one in found)


CALLS = {
    "/v1/chat/completions": ("chatcmpl-", {"messages": [user("one")]}),
    "/v1/responses": ("resp_", {"input": "two"}),
    "/v1/messages": ("msg_", {"messages": [user("three")], "max_tokens": 6}),
}


def rewarded(*extra: Any, reward: Any = None) -> Trajectory:
    """A sample with an answer of each API, of the rewards 1, 2 and 3, and of further pairs of id and reward."""

    def run(row: Mapping[str, Any], model: PolicyEndpoint) -> ProgramResult:
        rewards = dict[str, Any]()
        for number, (path, (prefix, body)) in enumerate(CALLS.items()):
            given = json.loads(Client(model).post({"model": "solver", **body}, path)[1])["id"]
            assert given.startswith(prefix)
            rewards[given] = number + 1
        other = json.loads(Client(model).post({"model": model.opponent, "messages": [user("?")]})[1])["id"]
        further = {other if name == "opponent" else name: value for name, value in extra}
        return ProgramResult(reward=reward, turn_rewards={**rewards, **further})

    (sample,) = converse(opened(NAME, Program(run), [{"prompt": "one"}]), fake(NAME))
    return sample


def test_rewards_of_answers_are_those_of_their_turns_and_add_up_with_that_of_the_last() -> None:
    for reward, last in ((None, 3.0), (0.5, 3.5)):
        sample = rewarded(reward=reward)
        assert [s.reward for s in sample.segments if s.sampled] == [1.0, 2.0, last]
        assert {s.role for s in sample.segments if s.sampled} == {"solver"}
        assert sample.environment_reward == 3.0 + last and sample.failure is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chatcmpl-7-9", 1.0, "expected turn_rewards by the ids of responses of the policy, got 'chatcmpl-7-9'"),
        ("opponent", 1.0, "expected turn_rewards by the ids of responses of the policy, got 'chatcmpl-0-3'"),
        ("0-1", float("nan"), "expected reward of 0-1 to be a number, got nan"),
        ("0-1", "much", "expected reward of 0-1 to be a number, got str 'much'"),
    ],
)
def test_a_reward_of_no_answer_or_without_a_finite_value_fails_the_sample_by_name(
    name: str, value: Any, message: str
) -> None:
    sample = rewarded((name, value))
    assert sample.failure is not None and message in sample.failure.cause and sample.environment_reward is None
