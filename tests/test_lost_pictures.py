"""A run with pictures ends where the policy would read placeholders without them; sampled placeholders train."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit.first_step import SavesAt
from kit.support import fit, tiny_module
from kit.vision import PROCESSORS, TOKENS, Camera, picture, vision_model
from typing_extensions import override

from lightning_rl import PromptDataModule, RLLightningModule, TransformersEngine
from lightning_rl.environments import Action, Environment, EnvironmentReward, StepResult
from lightning_rl.evaluation.questions import Questions
from lightning_rl.generation import Completion, Request
from lightning_rl.rollouts import collector
from lightning_rl.rollouts.collector import Collector
from lightning_rl.rollouts.progress import CurrentRollout
from lightning_rl.samples import Trajectory

Patch = pytest.MonkeyPatch
TALK = [{"role": "user", "content": "what color"}]


def module_of(**options: Any) -> RLLightningModule:
    policy = partial(vision_model, "qwen2_5_vl")
    return tiny_module(**{"policy": policy, "tokenizer": PROCESSORS["qwen2_5_vl"](), "max_new_tokens": 6, **options})


def shown(**options: Any) -> PromptDataModule:
    rows = [{"prompt": TALK, "images": [picture(color)]} for color in ("red", "green", "blue", "white")]
    return PromptDataModule(rows, 2, **options)


def blind(samples: list[Trajectory]) -> list[Trajectory]:
    return [replace(each, request=replace(each.request, media=None)) for each in samples]


def test_a_checkpoint_within_a_rollout_without_its_pictures_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    halves: dict[str, Any] = {"minibatches_per_rollout": 2}
    state = CurrentRollout.state

    def state_of_text(self: CurrentRollout) -> dict[str, Any]:
        return state(replace(self, rollout=self.rollout.without_arguments()))

    for path in ("whole.ckpt", "lost.ckpt"):
        fit(module_of(**halves), callbacks=[SavesAt(1, tmp_path / path)], data=shown(), max_steps=2)
        monkeypatch.setattr(CurrentRollout, "state", state_of_text)
    fit(module_of(**halves), data=shown(), ckpt_path=tmp_path / "whole.ckpt", max_steps=2)
    with pytest.raises(ValueError, match=r"expected pictures in rows with <image>, .* got none in 8 rows \(sample 0\)"):
        fit(module_of(**halves), data=shown(), ckpt_path=tmp_path / "lost.ckpt", max_steps=2)


@pytest.mark.parametrize("replies", [False, True])
def test_rows_that_lose_their_pictures_are_refused(replies: bool, monkeypatch: Patch) -> None:
    lay_out = collector.lay_out
    monkeypatch.setattr(collector, "lay_out", lambda *given, **named: lay_out(*given, **named).without_arguments())
    talks = {"environment": Camera, "rewards": EnvironmentReward(), "max_new_tokens": 12, "max_turn_tokens": 3}
    options, data = (talks, PromptDataModule([{"prompt": TALK}] * 4, 2)) if replies else ({}, shown())
    with pytest.raises(ValueError, match="expected pictures in rows with <image>"):
        fit(module_of(**options), data=data, max_steps=1)


def of_baseline(monkeypatch: Patch) -> None:
    opens = Collector.open

    def blind_baseline(self: Collector, *given: Any, **options: Any) -> list[Trajectory]:
        made = opens(self, *given, **options)
        return [one for each in made for one in (blind([each]) if each.baseline else [each])]

    monkeypatch.setattr(Collector, "open", blind_baseline)


def of_evaluation(monkeypatch: Patch) -> None:
    opens = Questions.open
    monkeypatch.setattr(Questions, "open", lambda *given: blind(opens(*given)))


@pytest.mark.parametrize("fault", [of_baseline, of_evaluation])
def test_a_request_without_the_pictures_of_its_prompt_is_refused(
    fault: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    data = shown(validation=[{"prompt": TALK, "images": [picture()]}])
    with pytest.raises(ValueError, match=r"expected a prompt without <image>, .* in the request of sample \d+"):
        fit(module_of(advantages="remax"), data=data, max_steps=2, num_sanity_val_steps=1)


class Sampling(TransformersEngine):
    """Samples a placeholder in each response."""

    @override
    def generate_batch(self, requests: Sequence[Request], *, logprobs: bool) -> list[Completion]:
        drawn = super().generate_batch(requests, logprobs=logprobs)
        return [replace(each, token_ids=(TOKENS["image"], *each.token_ids[1:])) for each in drawn]


class Words(Environment):
    """Asks again once."""

    turn = 0

    @override
    def step(self, answer: Action) -> StepResult:
        self.turn += 1
        return StepResult(messages=[{"role": "user", "content": "red"}], done=self.turn == 2, reward=1.0)


@pytest.mark.parametrize("pictures", [0, 1])
def test_sampled_placeholders_train_as_tokens(pictures: int) -> None:
    rows = [{"prompt": TALK, "images": [picture()] * pictures} for _ in range(4)]
    module = module_of(environment=Words, engine=Sampling(), max_turn_tokens=3, rewards=EnvironmentReward())
    trainer = fit(module, data=PromptDataModule(rows, 2), max_steps=2)
    assert trainer.global_step == 2
