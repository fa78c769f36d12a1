"""Runs whose samples are programs that call the policy: they train, resume, evaluate, and pass the audit."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environments.templates import FAMILIES, close_of, tokenizer_of
from kit.chats import CHAT, CLOSE, COLOURS, NUMBERS, VOCABULARY, chat_prompts
from kit.harnesses import HARNESSES, SIZE, Client, TransformersTogether, at_once, harness_rows, run_harness, user
from kit.support import fit, recorder, tiny_module, tiny_policy, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.testing import assert_close
from typing_extensions import override

from lightning_rl import FakeEngine, ModelOptions, PromptDataModule, RLLightningModule, Rollout
from lightning_rl.audit import SignalAudit
from lightning_rl.callbacks import TruncatedIS
from lightning_rl.corrections import Outputs
from lightning_rl.environments import EnvironmentReward, Program, ProgramResult
from lightning_rl.environments.program import PolicyEndpoint
from lightning_rl.generation import Completion, Request, TransformersEngine
from lightning_rl.policy import make_plan
from lightning_rl.policy.sequences import sequences_of
from lightning_rl.recording import Recording, RolloutRecorder, replay
from lightning_rl.recording.differences import replay_differences
from lightning_rl.rollout import join_tokens, tree_of
from lightning_rl.signal.reductions import resolve_reduction
from lightning_rl.update import accumulate_gradient, from_table

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pre-optimization state.*:UserWarning", "ignore:The dirpath has changed:UserWarning"
)
QUESTIONS = ("look one", "look two")


def appending(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """Ask three times, at most for two tokens the second time."""
    ask, messages = Client(model), list(row["prompt"])
    for limit in (None, 2, None):
        messages += [ask(messages, max_tokens=limit), user("red")]
    return 0.25 * len({word for message in messages for word in message["content"].split()})


def editing(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
    """Replace the text of an answer, and write one where the policy wrote none."""
    ask, messages = Client(model), list(row["prompt"])
    messages += [ask(messages), user("red")]
    messages += [{"role": "assistant", "content": "blue"}, user("not")]
    messages += [ask(messages), user("green")]
    return 0.25 * len(set(ask(messages)["content"].split()))


def forking(row: Mapping[str, Any], model: PolicyEndpoint) -> ProgramResult:
    """Ask, have two sub-agents answer, go on, and begin again with another answer."""
    ask, messages = Client(model), list(row["prompt"])
    messages += [ask(messages), user("red")]

    def work(place: int) -> list[Any]:
        question = [*messages[:-1], user(QUESTIONS[place])]
        return [*question, ask(question), user("?")]

    words = at_once(ask, work)
    messages += [ask(messages), user("not")]
    last = ask([*messages[:1], {"role": "assistant", "content": "blue"}, user("green")])
    found = set(" ".join([*words, str(last["content"])]).split())
    return ProgramResult(reward=0.25 * len(found), metrics={"words": len(found)})


def module_of(program: Any = forking, **options: Any) -> RLLightningModule:
    kept = {name: value for name, value in CHAT.items() if name != "max_turns"}
    return tiny_module(
        **{
            **kept,
            "environment": Program(program, timeout=60),
            "engine": TransformersTogether(),
            "max_new_tokens": 40,
            "minibatches_per_rollout": 2,
            **options,
        }
    )


@pytest.mark.parametrize("program", [appending, editing, forking])
def test_rows_of_programs_train_and_the_audit_finds_nothing(program: Any, tmp_path: Path) -> None:
    seen, audit = list[Rollout](), SignalAudit(every_n_rollouts=1, mode="raise")
    callbacks = [recorder(seen)("seen"), audit]
    fit(
        module_of(program),
        data=chat_prompts(8),
        callbacks=callbacks,
        default_root_dir=tmp_path,
        logger=CSVLogger(tmp_path),
    )
    assert audit.findings == [] and len(seen) == 2 and "logged_metrics" not in audit.skipped
    for rollout in seen:
        ours, drawn = rollout.require("old_logprobs"), rollout.action_mask
        assert drawn.any() and rollout.rewards.std() > 0
        if rollout is seen[0]:
            assert_close(ours[drawn], rollout.require("rollout_logprobs")[drawn], atol=1e-5, rtol=0)


class Kept(TransformersEngine):
    """Keeps what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = list[tuple[Request, Completion]]()

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        completions = super().generate_batch(requests, logprobs=logprobs)
        self.drawn += zip(requests, completions, strict=True)
        return completions


def drawn_of(rollout: Rollout) -> list[tuple[int, list[int], list[int], torch.Tensor]]:
    """Sample, prefix, ids and old log-probabilities of each sampled node, from the fields of a rollout."""
    tree, logprobs = tree_of(rollout), rollout.require("old_logprobs")
    ids = join_tokens(rollout, rollout.prompt_ids, rollout.response_ids).tolist()
    fields = (rollout.action_mask, logprobs)
    drawn, ours = (join_tokens(rollout, one.new_zeros(rollout.prompt_ids.shape), one) for one in fields)
    found, paths = [], list[list[int]]()
    for row, parent, start, size in zip(*(field.tolist() for field in tree[:4]), strict=True):
        before, inside = paths[parent] if parent >= 0 else [], slice(start, start + size)
        paths.append(before + ids[inside])
        assert drawn[inside].all() or not drawn[inside].any()
        if size and drawn[start]:
            found.append((int(rollout.sample_ids[row]), before, ids[inside], ours[inside]))
    return found


@pytest.mark.filterwarnings("ignore:2 of 26 conversations failed")  # two templates raise at a system message
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (place > 14)) for place, name in enumerate(FAMILIES)]
)
def test_a_rollout_has_each_drawn_token_in_its_context_with_the_log_probability_of_the_engine(name: str) -> None:
    seen, engine = list[Rollout](), Kept()
    module = tiny_module(
        policy=partial(tiny_policy, vocab_size=SIZE, max_position_embeddings=4096),
        tokenizer=tokenizer_of(name),
        environment=Program(run_harness, timeout=60),
        rewards=EnvironmentReward(),
        tool_parser=FAMILIES[name].renderer or None,
        engine=engine,
        group_size=2,
        epochs_per_rollout=2,
        max_turns=100,
        max_turn_tokens=6,
        max_new_tokens=2000,
        eos_token_ids=sorted(close_of(name)),
    )
    fit(
        module,
        data=PromptDataModule(harness_rows(name), len(HARNESSES), shuffle=False),
        callbacks=[recorder(seen)("seen")],
    )
    ours = sorted(drawn_of(seen[0]), key=lambda one: one[:3])
    theirs = [(r.sample_id, [*r.prefix_ids], [*c.token_ids], c.logprobs) for r, c in engine.drawn]
    for one, other in zip(ours, sorted(theirs, key=lambda one: one[:3]), strict=True):
        assert one[:3] == other[:3]
        assert_close(one[3], other[3], atol=1e-5, rtol=0)


def three_words(request: Request) -> list[int]:
    """One to three words, the same for a sample and turn in any context."""
    return [VOCABULARY.index(NUMBERS[each]) for each in range(1 + (request.sample_id + request.turn) % 3)] + [CLOSE[0]]


@pytest.mark.parametrize(("histories", "contexts"), [("one", 1), ("forks", 2), ("new", 3)])
def test_the_weight_of_a_sample_does_not_depend_on_the_number_of_its_contexts(histories: str, contexts: int) -> None:
    def program(row: Mapping[str, Any], model: PolicyEndpoint) -> float:
        ask, messages, answers = Client(model), list(row["prompt"]), list[Any]()
        first = messages
        for word in COLOURS:
            answers.append(ask(messages))
            after = {"one": [*messages, answers[-1]], "forks": [*first, answers[0]], "new": []}[histories]
            messages = [*after, user(word)]
        return 0.25 * len(answers[0]["content"].split())

    seen, policy = list[Rollout](), partial(CHAT["policy"], dtype=torch.float64)
    module = module_of(program, policy=policy, engine=FakeEngine(three_words), minibatches_per_rollout=1)
    fit(module, data=chat_prompts(4), callbacks=[recorder(seen)("seen")])
    (rollout,) = seen
    assert len(sequences_of(rollout).row) == 16 * contexts
    drawn, advantages = rollout.sampled_lengths.double(), rollout.require("advantages").double()
    of_group = torch.zeros_like(drawn).index_add(0, rollout.groups, drawn)[rollout.groups]
    weights = {
        "token_mean": drawn / drawn.sum(),
        "sequence_mean": torch.full_like(drawn, 1 / 16),
        "prompt_mean": drawn / of_group / 4,
        "sequence_sum_norm": drawn / 40 / 16,
    }
    means = (advantages * rollout.valid_tokens).sum(-1) / drawn
    assert means.any()
    for (reduction, expected), budget in itertools.product(weights.items(), (4096, 30)):
        plan = make_plan(rollout, minibatches=1, max_tokens_per_microbatch=budget, by_sequence=True)
        assert any(microbatch.parts for microbatch in plan.step(0)) == (budget == 30 and contexts > 1)
        table = torch.zeros(rollout.valid_tokens.shape, dtype=torch.float64, requires_grad=True)
        algorithm = module.run.algorithm.replace(reduction=resolve_reduction(reduction, 40))
        forward = from_table(Outputs(table, torch.zeros_like(table), None))
        accumulate_gradient(rollout, plan.step(0), forward, algorithm, backward=torch.Tensor.backward)
        assert table.grad is not None
        assert_close(table.grad.sum(-1), -means * expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_resume_is_bitwise_with_programs_in_flight(tmp_path: Path, max_staleness: int) -> None:
    def run(folder: Path, ckpt_path: Path | None = None) -> RLLightningModule:
        model = ModelOptions(consistency="bitwise")  # a batch of the engine depends on timing
        module = module_of(max_staleness=max_staleness, model=model)
        saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "ckpt_path": ckpt_path}
        fit(module, data=chat_prompts(12), callbacks=[saving, TruncatedIS()], default_root_dir=folder, **options)
        return module

    whole = weights_of(run(tmp_path / "whole"))
    for step in (1, 3, 4):
        resumed = weights_of(run(tmp_path / f"from-{step}", tmp_path / "whole" / f"step={step}.ckpt"))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_an_evaluation_runs_programs_and_a_recording_of_them_replays_bitwise(tmp_path: Path) -> None:
    module, rows = (
        module_of(minibatches_per_rollout=3),
        [{"prompt": [user(f"say {color} ?")], "place": 0} for color in COLOURS],
    )
    data = PromptDataModule(rows, 3, shuffle=False, validation=rows)
    trainer = fit(module, data=data, callbacks=[RolloutRecorder(tmp_path)])
    (figures,) = trainer.validate(module, data, verbose=False)
    assert figures["val/reward/EnvironmentReward"] > 0
    for recording in [Recording.load(path) for path in sorted(tmp_path.glob("*.json"))]:
        (found,) = replay([recording], [recording.algorithm()])
        assert [one for _, one in replay_differences(recording, found) if one is not None] == []
