"""The adapter for verifiers, with the package itself: run by ``make test-verifiers``, left out where it is missing."""

import csv
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.templates import tokenizer_of
from kit.support import fit, recorder, tiny_module, tiny_policy
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_rl import PromptDataModule, RLLightningModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.corrections import RLCallback
from lightning_rl.environments import EnvironmentReward, program
from lightning_rl.environments.adapters.verifiers import Verifiers
from lightning_rl.environments.program import Exchanged, tree_of
from lightning_rl.generation import Request, request_seed
from lightning_rl.samples import Trajectory
from lightning_rl.samples.seeds import call_seed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="no verifiers: make test-verifiers"),
    pytest.mark.filterwarnings("ignore"),  # those of its 25 dependencies are not ours
]
PLUGINS = Path(__file__).with_name("plugins")
CONFIG = {"taskset": {"id": "counted-talk"}, "agent": {"runtime": {"type": "subprocess"}}}
FAULTS = ("raises", "hangs", "rewrites", "asks twice", "reward raises", "asks nothing", "exits", "blocks")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


@pytest.fixture
def make(plugins: None) -> Any:
    """Makes the adapter for the tasks of the plugin."""
    return partial(Verifiers, CONFIG)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Exchanged]:
    """Calls of all samples, failed tries too."""
    kept: list[Exchanged] = []

    def tree(wanted: Trajectory, calls: Sequence[Exchanged]) -> Any:
        kept.extend(calls)
        return tree_of(wanted, calls)

    monkeypatch.setattr(program, "tree_of", tree)
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
            "max_turns": 8,
            "max_turn_tokens": 6,
            "max_new_tokens": 32,
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


def paths_of(rollout: Rollout) -> Counter[tuple[int, ...]]:
    """Ids of the path of each answer in the trees of a rollout, from the prompt or the root of its context."""
    paths = Counter[tuple[int, ...]]()
    assert rollout.segments is not None
    for row in range(len(rollout)):
        prompt = rollout.prompt_ids[row, : int(rollout.prompt_lengths[row])].tolist()
        segments, length = rollout.segments.of_row(row).tolist(), int(rollout.response_lengths[row])
        ends = [*(begin for begin, _, _ in segments[1:]), length]
        until: dict[int, tuple[int, ...]] = {-1: tuple(prompt), -2: ()}
        for place, ((begin, parent, _), end) in enumerate(zip(segments, ends, strict=True)):
            until[place] = (*until[parent], *rollout.response_ids[row, begin:end].tolist())
            paths[until[place]] += bool(rollout.action_mask[row, begin])
    return +paths


def test_what_trains_is_what_went_over_the_gateway_id_by_id(make: Any, log: list[Exchanged], tmp_path: Path) -> None:
    maker = make()
    audit, logger = SignalAudit(every_n_rollouts=1, mode="raise"), CSVLogger(tmp_path, name="", version="")
    kept, trainer = rollouts_of(module_of(maker), maker.rows()[:4], audit, max_epochs=3, logger=logger)
    assert len(kept) == 3 and trainer.global_step == 3
    seen = Counter((*each.request.prefix_ids, *each.completion.token_ids) for each in log)
    assert sum(map(paths_of, kept), Counter()) == seen and seen.total() > 100
    for rollout in kept:
        rewards = rollout.rewards[rollout.rewarded]
        assert rollout.rewarded.all() and (rewards >= 0.5).all() and rewards.unique().numel() > 1
    (*_, figures) = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    assert float(figures["env/rewards/constant"]) == 1.0 and float(figures["env/failed"]) == 0.0
    assert {"env/characters", "env/program_turns", "env/turns", "env/reward"} <= set(figures)


def test_samples_turns_and_seeds_are_those_of_the_run(make: Any) -> None:
    asked: list[Request] = []

    class Watch(RLCallback):
        name = "watch"

        @override
        def observe_generated(self, pairs: Any) -> None:
            asked.extend(request for request, _ in pairs)

    maker = make()
    rollouts_of(module_of(maker, seed=3), maker.rows()[:4], Watch(), max_epochs=2)
    assert {request.turn for request in asked} == {0, 1, 2, 3}
    assert {request.sample_id for request in asked} == set(range(32))
    for request in asked:  # 16 samples a rollout
        first = request_seed(3, request.sample_id // 16, request.sample_id)
        assert request.seed == call_seed(first, request.prefix_ids, 0)


CAUSES = {
    "raises": "HarnessError: .*OSError: the connection is gone",
    "hangs": "timeout: the program took longer than 10 s for a sample",
    "reward raises": "TaskError: .*OSError: no scorer",
    "asks nothing": "TaskError: .*division by zero",
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
    assert rollout.failed.tolist() == [False] * 2 + [True] * 10
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


@pytest.mark.parametrize("fault", ["rewrites", "asks twice"])
def test_branches_of_a_trace_are_contexts_of_one_sample(make: Any, fault: str, log: list[Exchanged]) -> None:
    maker = make()
    (row,) = [row for row in maker.rows() if maker.tasks[row["task"]].data.fault == fault]
    (rollout,), _ = rollouts_of(module_of(maker, group_size=2), [row])
    assert rollout.trained.all() and rollout.rewarded.all() and len(rollout) == 2
    assert paths_of(rollout) == Counter((*each.request.prefix_ids, *each.completion.token_ids) for each in log)
    assert rollout.segments is not None
    parents = Counter(parent for _, parent, _ in rollout.segments.of_row(0).tolist())
    assert len(log) == (6 if fault == "rewrites" else 10) and max(parents.values()) == 2 + (fault != "rewrites")


def test_a_harness_that_blocks_is_killed_in_a_process_of_its_own(make: Any, tmp_path: Path) -> None:
    maker = make(timeout=5)
    (row,) = [row for row in maker.rows() if maker.tasks[row["task"]].data.fault == "blocks"]
    module = module_of(maker, group_size=2, max_environment_failure_rate=None, environment_workers=2)
    (rollout,), _ = rollouts_of(module, [row, maker.rows()[0]], default_root_dir=tmp_path)
    assert rollout.failed.tolist() == [True, True, False, False]
    assert all(each["failure"].startswith("timeout: the program took longer") for each in failures_of(tmp_path))
    assert module.run.workers is not None and module.run.workers.pids() == []


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


def test_sampling_of_an_agent_has_no_effect_and_a_warning(make: Any) -> None:
    program.IGNORED.clear()
    maker = make()
    (expected,), _ = rollouts_of(module_of(maker), maker.rows()[:1])
    other = Verifiers({**CONFIG, "agent": {**CONFIG["agent"], "sampling": {"temperature": 0.5}}})
    with pytest.warns(UserWarning, match="sets temperature, which has no effect: sampling= of the module decides"):
        (rollout,), _ = rollouts_of(module_of(other), other.rows()[:1])
    assert torch.equal(rollout.response_ids, expected.response_ids)


def test_what_does_not_fit_is_refused(plugins: None) -> None:
    maker = Verifiers(CONFIG, max_tasks=2)
    assert maker.rows() == [{"prompt": "say something 0", "task": 0}, {"prompt": "say something 1", "task": 1}]
    for number in (2, -1, None, "0", True):
        with pytest.raises(ValueError, match="expected column 'task' to be the number of one of 2 tasks, got"):
            maker.task_of({"task": number})
