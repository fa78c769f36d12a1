"""The adapter for verifiers, with the package itself: run by ``make test-verifiers``, left out where it is missing."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from aiohttp import web
from environments.templates import tokenizer_of
from kit.support import fit, recorder, tiny_module, tiny_policy
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_rl import FinishReason, PromptDataModule, RLLightningModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.corrections import RLCallback
from lightning_rl.environments import EnvironmentReward
from lightning_rl.environments.adapters import verifiers as adapter
from lightning_rl.environments.adapters.completion_server import CompletionServer
from lightning_rl.environments.adapters.verifiers import Episode, Verifiers
from lightning_rl.generation import Request, request_seed, turn_seed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="no verifiers: make test-verifiers"),
    pytest.mark.filterwarnings("ignore"),  # those of its 25 dependencies are not ours
]
PLUGINS = Path(__file__).with_name("plugins")
RENDERER = {"name": "qwen3", "thinking_retention": "all"}
CONFIG = {"taskset": {"id": "counted-talk"}, "agent": {"runtime": {"type": "subprocess"}}}
Exchange = tuple[str, dict[str, Any], dict[str, Any]]
FAULTS = ("raises", "hangs", "rewrites", "asks twice", "reward raises", "asks nothing", "exits", "blocks")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("tokenizer")
    tokenizer_of("qwen3").save_pretrained(where)
    return str(where)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


@pytest.fixture
def make(folder: str, plugins: None) -> Any:
    """Makes the adapter for the tasks of the plugin."""
    return partial(Verifiers, CONFIG, folder, RENDERER)


class Seen(CompletionServer):
    """Keeps what came and what went, by session.

    Args:
        log: where to.
    """

    def __init__(self, log: list[Exchange]) -> None:
        self.log = log
        super().__init__()

    @override
    async def serve(self, request: web.Request) -> web.Response:
        response = await super().serve(request)
        body = await request.read()
        if body and response.status == 200:
            assert isinstance(response.body, bytes)
            self.log.append((request.headers["X-Session-ID"], json.loads(body), json.loads(response.body)))
        return response


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Exchange]:
    """Requests and responses of all endpoints."""
    kept: list[Exchange] = []
    monkeypatch.setattr(adapter, "CompletionServer", partial(Seen, kept))
    return kept


def module_of(environment: Any, **options: Any) -> RLLightningModule:
    tokenizer = tokenizer_of("qwen3")
    ends = [*tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]), *range(10, 60)]  # so that some end
    return tiny_module(
        **{
            "policy": partial(tiny_policy, vocab_size=len(tokenizer), max_position_embeddings=256),
            "tokenizer": tokenizer,
            "environment": environment,
            "rewards": EnvironmentReward(),
            "max_turns": 3,
            "max_turn_tokens": 6,
            "max_new_tokens": 16,
            "eos_token_ids": ends,
            **options,
        }
    )


def data_of(rows: list[dict[str, Any]]) -> PromptDataModule:
    return PromptDataModule(rows, len(rows), shuffle=False)


def rollouts_of(module: RLLightningModule, rows: list[dict[str, Any]], *callbacks: Any, **options: Any) -> Any:
    kept: list[Rollout] = []
    trainer = fit(module, data=data_of(rows), callbacks=[recorder(kept)("kept"), *callbacks], **options)
    return kept, trainer


def rows_seen(log: list[Exchange]) -> Counter[tuple[Any, ...]]:
    """Prompt, response and who said each token of it, as they went over the endpoint, for each session."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for session in {session for session, _, _ in log}:
        turns = [(asked["token_ids"], said["choices"][0]["token_ids"]) for name, asked, said in log if name == session]
        prompt, response, drawn = turns[0][0], list[int](), list[bool]()
        for prefix, ids in turns:
            assert prefix[: len(prompt) + len(response)] == prompt + response
            bridge = prefix[len(prompt) + len(response) :]
            response += [*bridge, *ids]
            drawn += [*[False] * len(bridge), *[True] * len(ids)]
        rows[tuple(prompt), tuple(response), tuple(drawn)] += 1
    return rows


def rows_trained(rollouts: list[Rollout]) -> Counter[tuple[Any, ...]]:
    """The same as rollouts have it; a row that failed had two tries with the same draws."""
    rows: Counter[tuple[Any, ...]] = Counter()
    for rollout in rollouts:
        for row in range(len(rollout)):
            prompt = rollout.prompt_ids[row, : int(rollout.prompt_lengths[row])].tolist()
            length = int(rollout.response_lengths[row])
            response = rollout.response_ids[row, :length].tolist()
            rows[tuple(prompt), tuple(response), tuple(rollout.action_mask[row, :length].tolist())] += 1 + int(
                rollout.failed[row]
            )
    return rows


def test_what_trains_is_what_went_over_the_endpoint_id_by_id(make: Any, log: list[Exchange], tmp_path: Path) -> None:
    maker = make()
    audit, logger = SignalAudit(every_n_rollouts=1, mode="raise"), CSVLogger(tmp_path, name="", version="")
    kept, trainer = rollouts_of(module_of(maker), maker.rows()[:4], audit, max_epochs=3, logger=logger)
    assert len(kept) == 3 and trainer.global_step == 3
    trained = rows_trained(kept)
    assert 48 <= trained.total() <= 52 and trained == rows_seen(log)
    assert any(drawn.index(False) < drawn.index(True, drawn.index(False)) for _, _, drawn in trained if False in drawn)
    ends = torch.cat([rollout.finish for rollout in kept]).unique().tolist()
    assert FinishReason.STOP in ends and FinishReason.TURNS in ends
    for rollout in kept:
        rewards = rollout.rewards[rollout.rewarded]
        assert (
            torch.equal(rollout.rewarded, ~rollout.failed) and (rewards >= 0.5).all() and rewards.unique().numel() > 1
        )
    (*_, figures) = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert float(figures["env/rewards/constant"]) == 1.0 and float(figures["env/failed"]) == 0.0
    assert {"env/characters", "env/program_turns", "env/turns", "env/reward"} <= set(figures)


class Kept(Episode):
    """An episode that is remembered, for what verifiers says of it."""

    all: ClassVar[list["Kept"]] = []

    def __init__(self, maker: Verifiers) -> None:
        super().__init__(maker)
        self.all.append(self)


def test_verifiers_has_the_same_rows_in_its_traces(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "Episode", Kept)
    Kept.all.clear()
    maker = make()
    kept, _ = rollouts_of(module_of(maker), maker.rows()[:4])
    (branches, *more) = zip(*[trace.branches for each in Kept.all for trace in each.traces.values()], strict=True)
    assert not more and len(branches) >= 16
    theirs = Counter((tuple(branch.token_ids), tuple(branch.sampled_mask)) for branch in branches)
    ours = Counter[Any]()
    for (prompt, response, drawn), number in rows_trained(kept).items():
        ours[(*prompt, *response), (*[False] * len(prompt), *drawn)] += number
    assert ours == theirs


def test_samples_turns_and_seeds_are_those_of_the_run(make: Any) -> None:
    asked: list[Request] = []

    class Watch(RLCallback):
        name = "watch"

        @override
        def observe_generated(self, pairs: Any) -> None:
            asked.extend(request for request, _ in pairs)

    maker = make()
    rollouts_of(module_of(maker, seed=3), maker.rows()[:4], Watch(), max_epochs=2)
    assert {request.turn for request in asked} == {0, 1, 2}
    assert {request.sample_id for request in asked} == set(range(32))
    for request in asked:  # 16 samples a rollout
        first = request_seed(3, request.sample_id // 16, request.sample_id)
        assert request.seed == turn_seed(first, request.turn)


CAUSES = {
    "raises": "HarnessError: .*OSError: the connection is gone",
    "hangs": "timeout: the program took longer than 10 s for a conversation",
    "rewrites": "ValueError: expected question 2 to go on from the .* the conversation was rendered again or rewritten",
    "asks twice": "ValueError: expected (one request at a time|question 3 to go on)",
    "reward raises": "TaskError: .*OSError: no scorer",
    "asks nothing": "ValueError: expected a program that asks the policy, got one that ended without a question",
    "exits": "SystemExit: 3",
}


def failures_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("failed_environments/*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_whatever_task_or_harness_do_wrong_costs_their_own_rows_and_is_never_worth_0(make: Any, tmp_path: Path) -> None:
    maker = make(timeout=10)
    faulty = {maker.tasks[row["task"]].data.fault: row for row in maker.rows()}
    rows = [maker.rows()[2], *[faulty[fault] for fault in CAUSES]]
    options = {"group_size": 2, "max_environment_failure_rate": None}
    (rollout,), _ = rollouts_of(module_of(maker, **options), rows, default_root_dir=tmp_path)
    assert rollout.failed.tolist() == [False] * 2 + [True] * 14
    assert not rollout.trained[2:].any() and not rollout.rewarded[2:].any() and rollout.trained[:2].all()
    failed = failures_of(tmp_path)
    for place, cause in enumerate(CAUSES.values()):
        for each in failed[2 * place : 2 * place + 2]:
            assert re.match(cause, each["failure"]), (cause, each["failure"])
    (sound,), _ = rollouts_of(module_of(maker, **options), rows[:1])
    assert torch.equal(sound.response_ids, rollout.response_ids[:2, : sound.width])
    assert torch.equal(sound.rewards, rollout.rewards[:2])


def test_processes_of_their_own_make_the_same_rows(make: Any) -> None:
    maker = make()
    rows = maker.rows()[:4]
    (here,), _ = rollouts_of(module_of(maker), rows)
    module = module_of(maker, environment_workers=2)
    (there,), _ = rollouts_of(module, rows)
    assert module.run.workers is not None and module.run.workers.pids() == []
    for name in ("prompt_ids", "response_ids", "action_mask", "rewards", "advantages", "finish"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name


def test_a_harness_that_blocks_is_killed_in_a_process_of_its_own(make: Any, tmp_path: Path) -> None:
    maker = make()
    (row,) = [row for row in maker.rows() if maker.tasks[row["task"]].data.fault == "blocks"]
    module = module_of(
        maker, group_size=2, max_environment_failure_rate=None, environment_workers=2, environment_timeout=5.0
    )
    (rollout,), _ = rollouts_of(module, [row, maker.rows()[0]], default_root_dir=tmp_path)
    assert rollout.failed.tolist() == [True, True, False, False]
    assert all(each["failure"].startswith("timeout: step took longer than 5 s") for each in failures_of(tmp_path))
    assert module.run.workers is not None and module.run.workers.pids() == []


def test_one_that_blocks_in_this_process_ends_the_run(folder: str, plugins: None) -> None:
    script = f"""
        from lightning_rl.environments.adapters import verifiers as adapter
        adapter.GRACE = 0.5
        maker = adapter.Verifiers({CONFIG!r}, {folder!r}, {RENDERER!r}, timeout=2)
        (task,) = [row for row in maker.rows() if maker.tasks[row["task"]].data.fault == "blocks"]
        environment = maker()
        environment.reset(task, 0)
        try:
            environment.step((5, 0), adapter_finish.STOP)
        finally:
            environment.close()
    """
    script = "from lightning_rl import FinishReason as adapter_finish\n" + textwrap.dedent(script)
    path = f"import sys; sys.path.insert(0, {str(PLUGINS)!r})\n"
    ended = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, timeout=120)
    assert "timeout: the program took longer than 2 s" in ended.stderr
    assert "BlockedEventLoopError: expected an episode that ends within 0.5 s" in ended.stderr


@pytest.mark.filterwarnings("ignore:rollout 0. the environment gave rewards")
def test_what_was_said_reaches_the_rewards_in_words(make: Any) -> None:
    talks: list[Any] = []

    def count(prompts: Any, completions: Any, *, conversation: Any, **_: Any) -> list[float]:
        talks.extend(conversation)
        return [float(len(talk)) for talk in conversation]

    maker = make()
    rollouts_of(module_of(maker, rewards=count, group_size=2), maker.rows()[1:2])
    assert [message["role"] for message in talks[0]] == ["user", "assistant", "user", "assistant"]
    said = talks[0][1].get("content", "")
    assert talks[0][0]["content"] == "say something 1"
    assert talks[0][2]["content"] == f"{len(said)} characters, go on"


def test_sampling_of_an_agent_is_refused_since_the_run_has_its_own(make: Any, folder: str) -> None:
    agent = {**CONFIG["agent"], "sampling": {"temperature": 0.5, "max_tokens": 9}}
    environment = Verifiers({**CONFIG, "agent": agent}, folder, RENDERER)()
    with pytest.raises(ValueError, match="expected a program that leaves sampling to the run, got max_tokens, temper"):
        environment.reset({"task": 0}, 0)
    environment.close()


def test_a_renderer_that_renders_anew_is_named(make: Any, folder: str, plugins: None) -> None:
    environment = Verifiers(CONFIG, folder, {"name": "qwen3"})()
    environment.reset({"task": 2}, 0)
    close = tokenizer_of("qwen3").convert_tokens_to_ids("<|im_end|>")
    with pytest.raises(ValueError, match=r"rendered again or rewritten.*thinking_retention='all'"):
        environment.step((*tokenizer_of("qwen3")(" a  b\n")["input_ids"], close), FinishReason.STOP)
    environment.close()


def test_what_does_not_fit_is_refused_when_it_is_made(folder: str, plugins: None, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected renderer 'gemma4' to take tokenizer"):
        Verifiers(CONFIG, folder, {"name": "gemma4"})
    maker = Verifiers(CONFIG, folder, RENDERER, max_tasks=2)
    assert maker.rows() == [{"prompt": "say something 0", "task": 0}, {"prompt": "say something 1", "task": 1}]
    for number in (2, -1, None, "0", True):
        with pytest.raises(ValueError, match="expected column 'task' to be the number of one of 2 tasks, got"):
            maker().reset({"task": number}, 0)
