"""Memory that runs out in an update: the step is made again with half the token budget and has the same gradient."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from kit.ranks import STRATEGIES, run_ranks
from kit.support import fit, tiny_module, tiny_policy, tiny_prompts, weights_of
from lightning.pytorch import Trainer
from torch import Tensor
from typing_extensions import override

from lightning_rl import LossTerm, LossView, RLCallback, RLLightningModule, Rollout
from lightning_rl.callbacks import AdaptiveKL
from lightning_rl.checkpointing import INTERRUPTED

BUDGET = 64


class Exhausts(RLCallback):
    """Runs out of memory in a microbatch of more than some tokens: in the forward, the loss or the backward."""

    name = "exhausts"

    def __init__(self, where: str, limit: float) -> None:
        self.where, self.limit = where, limit
        self.gradients: list[Tensor] = []
        self.microbatches: list[int] = []

    def check(self, where: str, rows: Rollout) -> None:
        """Runs out, if it is here."""
        size = int((rows.prompt_lengths + rows.response_lengths)[rows.real].sum())
        if where == self.where and size > self.limit:
            raise torch.OutOfMemoryError(f"no room for {size} tokens")

    @contextmanager
    @override
    def forward_context(self, rows: Rollout) -> Iterator[None]:
        if torch.is_grad_enabled():
            self.check("forward", rows)
        yield

    @override
    def token_weight(self, view: LossView) -> Tensor:
        self.check("loss", view)
        self.microbatches.append(len(view))
        return torch.ones_like(view.logprobs)

    @override
    def loss_term(self, view: LossView) -> LossTerm:
        own = view.logprobs * 0.0
        if self.where == "backward":
            own.register_hook(lambda _: self.check("backward", view))
        return LossTerm(per_token=own, coef=0.1)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in pl_module.policy.parameters()]))


def a_module(**options: Any) -> RLLightningModule:
    """In float64: of a gradient near 0, rounding alone says which way AdamW goes."""
    policy = partial(tiny_policy, dtype=torch.float64)
    return tiny_module(
        policy=policy, minibatches_per_rollout=2, max_tokens_per_microbatch=BUDGET, max_grad_norm=None, **options
    )


def run(
    where: str = "", limit: float = 1e9, *, saving: bool | Literal["full"] = False, **options: Any
) -> tuple[RLLightningModule, Exhausts, Trainer]:
    """One rollout of two steps."""
    module, exhausts = a_module(activation_checkpointing=saving), Exhausts(where, limit)
    callbacks = [exhausts, AdaptiveKL(0.1, as_loss=True)]
    return module, exhausts, fit(module, callbacks=callbacks, data=tiny_prompts(4, 4), **options)


@pytest.fixture(scope="module")
def undisturbed() -> tuple[RLLightningModule, Exhausts, Trainer]:
    return run()


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_step_is_made_again_in_smaller_microbatches_with_the_same_gradient(
    where: str, undisturbed: tuple[RLLightningModule, Exhausts, Trainer]
) -> None:
    whole, seen, _ = undisturbed
    with pytest.warns(UserWarning, match=r"out of memory in step 0 of rollout 0: the step is repeated with .*=32"):
        halved, again, trainer = run(where, 40)
    assert trainer.global_step == 2 and len(again.gradients) == len(seen.gradients) == 2
    assert len(again.microbatches) > len(seen.microbatches)
    torch.testing.assert_close(again.gradients[0], seen.gradients[0], rtol=0, atol=1e-12)
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(weights_of(halved)[name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("saving", "cures"),
    [
        (False, 'activation_checkpointing="full" or max_tokens_per_microbatch=16'),
        ("full", "max_tokens_per_microbatch=16"),
        (True, 'activation_checkpointing="full" or max_tokens_per_microbatch=16'),
    ],
)
def test_a_step_that_does_not_fit_with_half_of_it_either_ends_the_run_with_a_checkpoint_and_advice(
    saving: bool | Literal["full"], cures: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="no room for") as caught,
        pytest.warns(UserWarning, match="repeated with max_tokens_per_microbatch=32"),
    ):
        run("forward", 3, saving=saving, default_root_dir=tmp_path)
    assert caught.value.__notes__[0] == (
        "expected an optimizer step that fits into memory, got max_tokens_per_microbatch=32 and "
        f"activation_checkpointing={saving if saving is not True else 'selective'!r}: pass {cures} to ModelOptions"
    )
    saved = torch.load(tmp_path / INTERRUPTED, weights_only=True)
    assert saved["global_step"] == 0
    assert tuple(saved["lightning_rl"]["ranks"][0]["budget"]) == (BUDGET, BUDGET // 2), (
        "so that a resume begins with it"
    )


@pytest.mark.nightly
def test_two_ranks_agree_when_memory_runs_out_on_one_of_them(tmp_path: Path) -> None:
    run_ranks(__file__, 2, tmp_path)


def rank(folder: Path) -> None:
    """Rank 0 runs out in the first step; both make it again, and end with the same weights as without."""
    ends = {}
    for where in ("", "forward", "loss"):
        module = a_module()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")

            first = os.environ["RANK"] == "0"
            exhausts = Exhausts(where, 40 if where and first else 1e9)
            fit(module, callbacks=[exhausts], data=tiny_prompts(8, 8), strategy=STRATEGIES["ddp"](), devices=2)
        said = [str(warning.message) for warning in caught if "out of memory" in str(warning.message)]
        assert bool(said) == (bool(where) and module.global_rank == 0), said
        ends[where] = weights_of(module)
        for name, weight in ends[where].items():
            torch.testing.assert_close(weight, ends[""][name], rtol=0, atol=1e-9)
    assert folder.exists()


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
