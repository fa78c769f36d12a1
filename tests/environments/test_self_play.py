"""Self-play of programs: opponents that do not train, roles, rewards of single answers, and runs of both kinds."""

import itertools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from kit.chats import CHAT, COLOURS
from kit.harnesses import Client, check_tree, fake, family_script, opened, random_policy, user
from kit.support import fit, recorder, tiny_module, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.testing import assert_close

from lightning_rl import FinishReason, PromptDataModule, Rollout
from lightning_rl.advantages import HierarchicalGRPO
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import RoleBaseline
from lightning_rl.environments import Program, ProgramResult, converse
from lightning_rl.environments.program import PolicyEndpoint
from lightning_rl.generation import Request
from lightning_rl.rollout import attempts_of, turn_numbers
from lightning_rl.samples import Trajectory

NAME = "qwen2.5"
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning", "ignore:The dirpath has changed:UserWarning"
)


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


def test_a_limit_that_one_of_several_parallel_calls_reaches_ends_the_sample() -> None:
    rows = [{"prompt": "one", "pause": 0.01}] * 8
    for sample in converse(opened(NAME, Program(propose_and_solve), rows, turns=8), fake(NAME)):
        assert sample.finish == FinishReason.TURNS and sample.metrics["turns"] == 8


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


RUN: dict[str, Any] = {**CHAT, "max_turns": 9}
ROWS = [
    {"prompt": [user(f"say {color} ?")], "role": "first" if n % 2 else "second"} for n, color in enumerate(COLOURS * 4)
]
KINDS: dict[str, tuple[Any, Any, list[Any]]] = {
    "proposer": (propose_and_solve, HierarchicalGRPO(), []),
    "players": (duel, "reinforce", [RoleBaseline]),
}


def trained(kind: str, *callbacks: Any, **options: Any) -> dict[str, Any]:
    program, advantages, corrections = KINDS[kind]
    module = tiny_module(
        **{**RUN, "environment": Program(program), "advantages": advantages, "max_new_tokens": 24, "group_size": 2}
    )
    data = PromptDataModule(ROWS, 2, shuffle=False, chat=True)
    fit(module, data=data, callbacks=[*(make() for make in corrections), *callbacks], max_steps=4, **options)
    return weights_of(module)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_self_play_trains_its_roles_alone_by_the_formula_and_the_audit_finds_nothing(
    kind: str, tmp_path: Path
) -> None:
    seen, audit = list[Rollout](), SignalAudit(every_n_rollouts=1, mode="raise")
    callbacks = [recorder(seen)("seen"), audit]
    trained(kind, *callbacks, default_root_dir=tmp_path, logger=CSVLogger(tmp_path))
    assert audit.findings == [] and len(seen) == 4 and any(rollout.rewards.std() > 0 for rollout in seen)
    baselines = {"first": 0.0, "second": 0.0}
    for rollout in seen:
        if kind == "players":
            assert not rollout.token_extras.keys() - {"turn_rewards"} and int(turn_numbers(rollout).amax()) == 3
            roles = [ROWS[group % 12]["role"] for group in rollout.groups.tolist()]
            for row, role in enumerate(roles):
                found = rollout.require("advantages")[row][rollout.valid_tokens[row]]
                assert_close(found, torch.full_like(found, float(rollout.rewards[row]) - baselines[role]))
            for role in baselines:
                rewards = [float(rollout.rewards[row]) for row, one in enumerate(roles) if one == role]
                baselines[role] = (
                    0.95 * baselines[role] + 0.05 * sum(rewards) / len(rewards) if rewards else baselines[role]
                )
        else:
            assert_close(rollout.require("advantages"), by_formula(rollout))


def by_formula(rollout: Rollout) -> torch.Tensor:
    """Advantages of proposals and attempts, from the turn rewards of each row."""

    def compare(value: float, values: list[float]) -> float:
        return (value - fmean(values)) / (stdev(values) + 1e-6) if max(values) - min(values) > 1e-9 else 0.0

    found = torch.zeros_like(rollout.require("advantages"))
    attempts, rewards = attempts_of(rollout), rollout.token_extras["turn_rewards"]
    for row in range(len(rollout)):
        returns = {
            each: float(rewards[row][attempts[row] == each].sum()) for each in range(2, 1 + int(attempts[row].amax()))
        }
        returns = {each: value for each, value in returns.items() if (attempts[row] == each).any()}
        assert len(returns) == 4  # each of two turns
        for attempt, value in returns.items():
            found[row][attempts[row] == attempt] = compare(value, [*returns.values()])
        proposals = [
            float(rewards[other][attempts[other] == 1].sum())
            for other in range(len(rollout))
            if rollout.groups[other] == rollout.groups[row]
        ]
        proposed = float(rewards[row][attempts[row] == 1].sum())
        found[row][attempts[row] == 1] = compare(proposed, proposals)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_of_self_play_is_bitwise(kind: str, tmp_path: Path) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> dict[str, Any]:
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        return trained(kind, saving, default_root_dir=folder, enable_checkpointing=True, ckpt_path=ckpt_path)

    whole, resumed = run(tmp_path / "whole"), run(tmp_path / "from-2", tmp_path / "whole" / "step=2.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
