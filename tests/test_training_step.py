"""Output of a training step for callbacks: the moments of the policy's entropy on this rank, or None."""

from typing import Any

import pytest
import torch
from kit.support import callback_of, fit, tiny_module, tiny_prompts
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_rl import FakeEngine, LossView, RLCallback, Stat
from lightning_rl.callbacks import EntropyBonus, NoEOSMask


class Outputs(Callback):
    """Keeps what every training step returned."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)


class Entropies(RLCallback):
    """Keeps the entropy of every valid token, by optimizer step."""

    name = "entropies"

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    @override
    def on_train_batch_start(self, *arguments: Any, **keywords: Any) -> None:
        self.steps.append([])

    @override
    def metrics(self, view: LossView) -> dict[str, Stat]:
        self.steps[-1].append(view.entropy[view.valid_tokens].double())
        return {"entropies/rows": Stat.of(view.trained)}


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [30, 4096])
def test_the_entropy_is_that_of_all_valid_tokens_of_the_step(budget: int) -> None:
    outputs, entropies = Outputs(), Entropies()
    fit(
        tiny_module(minibatches_per_rollout=2, epochs_per_rollout=2, max_tokens_per_microbatch=budget),
        callbacks=[outputs, entropies],
    )
    assert len(outputs.seen) == len(entropies.steps) == 16
    assert any(len(parts) > 1 for parts in entropies.steps) is (budget == 30)  # short responses fit into one microbatch
    for given, parts in zip(outputs.seen, entropies.steps, strict=True):
        moments, joint = given["policy/entropy"], torch.cat(parts)
        assert given.keys() == {"policy/entropy", "loss/total", "loss/policy", "optim/grad_norm"}
        torch.testing.assert_close(moments, Stat.of(joint).moments, rtol=1e-10, atol=1e-10)
        assert not moments.requires_grad and moments[0] == len(joint)


@pytest.mark.filterwarnings("ignore:rollout . taught the policy nothing")
def test_a_step_without_a_valid_token_returns_nothing() -> None:
    outputs = Outputs()
    engine = FakeEngine(lambda request: [5] * request.sampling.max_new_tokens)
    fit(tiny_module(engine=engine), callbacks=[outputs, NoEOSMask("drop_tokens")], max_epochs=1)
    assert [dict(given) for given in outputs.seen] == [{}] * 4


def test_a_step_that_was_skipped_returns_no_entropy_and_leaves_a_coefficient_that_adapts() -> None:
    infinite = iter([False, True, False, False])
    outputs, bonus = Outputs(), EntropyBonus(0.02, target=9.0, step=0.01)
    explodes = callback_of(
        "explodes", token_weight=lambda view: torch.full_like(view.entropy, torch.inf if next(infinite) else 1.0)
    )
    module = tiny_module()
    fit(module, callbacks=[outputs, bonus, explodes], data=tiny_prompts(16), max_epochs=1)
    entropies = ["policy/entropy" in given for given in outputs.seen]
    assert entropies == [True, False, True, True] and module.run.progress.skipped == 1
    assert bonus.coef == pytest.approx(0.02 + 3 * 0.01)
