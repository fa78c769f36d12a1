"""ReMax in a fit: one sample of each prompt against a greedy answer, which is scored and never trained on."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kit.support import (
    EOS,
    a_trainer,
    fit,
    recorder,
    tiny_module,
    tiny_policy,
    tiny_prompts,
    tiny_tokenizer,
    weights_of,
)
from typing_extensions import override

from lightning_rl import FakeEngine, PromptDataModule, RLCallback, RLLightningModule, Rollout
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.generation import Request


def trained(*callbacks: RLCallback, **options: Any) -> tuple[RLLightningModule, list[Rollout]]:
    seen: list[Rollout] = []
    module = tiny_module(**{"advantages": "remax", "group_size": 1, "epochs_per_rollout": 2, **options})
    fit(module, callbacks=[*callbacks, recorder(seen)("recorder")])
    return module, seen


def test_advantages_are_what_a_token_still_earns_minus_the_greedy_score() -> None:
    module, seen = trained(ReferenceKL(0.5))
    assert len(seen) == 4 and all(len(rollout) == 4 for rollout in seen)
    for rollout in seen:
        penalty = 0.5 * (rollout.require("old_logprobs") - rollout.require("ref_logprobs"))
        later = torch.where(rollout.valid_tokens, penalty, 0.0).flip(-1).cumsum(-1).flip(-1)
        expected = (rollout.rewards - rollout.extras["greedy_score"])[:, None] - later
        gap = (rollout.require("advantages") - expected)[rollout.valid_tokens]
        assert float(gap.abs().max()) < 1e-5
    assert any(rollout.extras["greedy_score"].unique().numel() > 1 for rollout in seen)
    assert moved(module)


def moved(module: RLLightningModule) -> bool:
    fresh, weights = tiny_policy().named_parameters(), weights_of(module)
    return any(not torch.equal(weights[f"policy.model.{name}"], weight) for name, weight in fresh)


def number_of_words(prompts: Any, completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def test_the_baseline_is_the_score_of_the_policys_own_greedy_answer() -> None:
    rows, seen, expected = [[2 + place] for place in range(8)], list[Rollout](), list[float]()

    class Asks(RLCallback):
        """Asks the policy for its greedy answers while its weights are those that the rollout is drawn with."""

        name = "asks"

        @override
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch.step == 0:
                own = pl_module.generate(rows[batch.rollout * 4 :][:4])
                expected.extend(number_of_words([], own))

    options: dict[str, Any] = {
        "advantages": "remax",
        "group_size": 1,
        "epochs_per_rollout": 2,
        "rewards": number_of_words,
    }
    module = tiny_module(tokenizer=tiny_tokenizer(), **options)
    fit(module, callbacks=[Asks(), recorder(seen)("recorder")], data=PromptDataModule(rows, 4, shuffle=False))
    assert [score for rollout in seen for score in rollout.extras["greedy_score"].tolist()] == expected
    assert len(set(expected)) > 1


def test_neither_validation_nor_completions_draw_baselines() -> None:
    engine = FakeEngine(lambda _: [5, EOS])
    module = tiny_module(advantages="remax", group_size=1, engine=engine, tokenizer=None)
    data = tiny_prompts(validation=[[2], [3], [4]])
    trainer = a_trainer()
    trainer.validate(module, data, verbose=False)
    assert [request.sampling.temperature for request in engine.requests] == [0.0] * 3
    module.generate([[2], [3]])
    assert [request.sampling.temperature for request in engine.requests[3:]] == [0.0] * 2


@pytest.mark.parametrize("advantages", ["grpo", "reinforce"])
def test_other_estimators_draw_no_greedy_answers(advantages: str) -> None:
    def script(request: Request) -> list[int]:
        return [5] * (1 + request.sample_id % 2) + [EOS]

    engine = FakeEngine(script)
    fit(tiny_module(engine=engine, advantages=advantages), max_steps=1)
    assert len(engine.requests) == 16 and {request.sampling.temperature for request in engine.requests} == {1.0}
