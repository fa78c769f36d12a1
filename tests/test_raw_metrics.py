"""Raw metrics: no edit by user code, by any means, changes what the core measures before it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import callback_of, fit, tiny_module, tiny_policy
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import SGD
from typing_extensions import override

from lightning_rl import LossView, Stat
from lightning_rl.advantages import Advantages, Estimator, Normalized, RewardSignal
from lightning_rl.corrections import CONTRIBUTIONS, LossTerm, RLCallback
from lightning_rl.losses import ClippedSurrogate, PolicyLoss
from lightning_rl.reporting.run_files import read_folder

RAW = (
    "kl/ref", "kl/old", "kl/rollout", "policy/entropy", "policy/ratio_max", "policy/ess", "reward/task",
    "reward/parity_reward", "reward/missing", "length/mean", "length/max", "length/truncated", "groups/sampled",
)  # fmt: skip
OF_LOSS = ("loss/policy", "loss/total")


def by_data(tensor: Tensor) -> None:
    tensor.data.fill_(1)


def by_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] = 1


Edit = Callable[[Tensor], None]
ways = pytest.mark.parametrize("edit", [by_data, by_numpy])


def edit_all(edit: Edit, seen: Any) -> None:
    for _, tensor in seen.tensors():
        edit(tensor)


def neutral(method: str, seen: Any) -> Any:
    """A valid contribution that changes nothing."""
    returns = CONTRIBUTIONS[method].returns
    if returns == "nothing":
        return None
    shape = seen.valid_tokens.shape if returns.startswith("token") else seen.groups.shape
    if returns in ("row float", "token float"):
        like = torch.ones if method == "token_weight" else torch.zeros
        return seen.rewards.clone() if method == "replace_reward" else like(shape)
    if returns in ("row mask", "token mask"):
        return torch.full(shape, method != "exclude")
    return {
        "term": lambda: LossTerm(per_token=seen.logprobs * 1, coef=0.0),
        "tensors": dict,
        "stats": dict,
        "context": lambda: torch.enable_grad(),
    }[returns]()


def vandal(method: str, edit: Edit) -> RLCallback:
    """A callback that contributes nothing and overwrites every tensor that a method is shown."""

    def body(seen: Any) -> Any:
        result = neutral(method, seen)
        if method == "observe_generated":
            for _, completion in seen:
                edit(completion.logprobs)
        else:
            edit_all(edit, seen)
        return result

    further = {"traces_step": lambda *_: True} if method == "observe_step" else {}
    return callback_of("vandal", **{method: body}, **further)


def vandal_loss(edit: Edit, method: str) -> PolicyLoss:
    """A loss that overwrites every tensor that a method is shown."""

    class Vandal(ClippedSurrogate):
        @override
        def __call__(self, view: LossView) -> Tensor:
            result = view.logprobs * 1
            if method == "call":
                edit_all(edit, view)
            return result

        @override
        def prepare(self, views: Sequence[LossView], global_sum: Any, global_concat: Any) -> None:
            for view in views if method == "prepare" else ():
                edit_all(edit, view)

        @override
        def metrics(self, view: LossView) -> dict[str, Stat]:
            if method == "metrics":
                edit_all(edit, view)
            return {}

    return Vandal()


def vandal_estimator(edit: Edit) -> Estimator:
    """An estimator that overwrites every tensor that it is shown."""

    class Vandal(Normalized):
        @override
        def __call__(self, signal: RewardSignal) -> Advantages:
            advantages = Advantages(signal.spread_out(signal.scores))
            edit_all(edit, signal)
            return advantages

    return Vandal()


def vandal_reduction(edit: Edit, valid: Tensor, trained: Tensor, groups: Tensor, _global_sum: Any) -> Tensor:
    weights = valid / valid.sum()
    for tensor in (valid, trained, groups):
        edit(tensor)
    return weights


class VandalHook(Callback):
    """Lightning callback that overwrites the outputs of each batch."""

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for tensor in outputs.values():
            self.edit(tensor)


def reader() -> RLCallback:
    """A callback that makes the run compute log-probabilities of the old policy and the reference."""
    return callback_of("reader", reads=("old_logprobs", "ref_logprobs"), reads_at_loss=("ref_logprobs",))


def logged(folder: Path, *callbacks: Callback, **options: Any) -> dict[str, dict[int, float]]:
    """Metrics by name and step of a run whose weights stand still, with a reference of other weights."""
    still: dict[str, Any] = {"optimizer": partial(SGD, lr=0.0), "reference": partial(tiny_policy, 1)}
    fit(
        tiny_module(minibatches_per_rollout=2, **{**still, **options}), callbacks=[reader(), *callbacks], max_steps=4,
        logger=CSVLogger(folder, name="", version=""), default_root_dir=folder,
    )  # fmt: skip
    metrics = read_folder([folder]).metrics
    return {name: metrics[name] for name in (*RAW, *OF_LOSS)}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    return logged(tmp_path_factory.mktemp("untouched"))


def raw(metrics: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {name: metrics[name] for name in RAW}


@ways
@pytest.mark.parametrize("method", [one for one in CONTRIBUTIONS if one != "choose_rows"])
def test_raw_metrics_do_not_depend_on_edits_by_a_callback(
    method: str, edit: Edit, untouched: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    per_token: dict[str, Any] = {"advantages": "reinforce_plus_plus"} if method == "token_reward" else {}
    assert raw(logged(tmp_path, vandal(method, edit), **per_token)) == raw(untouched)


@ways
@pytest.mark.parametrize("part", ["call", "prepare", "metrics", "estimator", "reduction"])
def test_raw_metrics_do_not_depend_on_edits_by_a_loss_an_estimator_or_a_reduction(
    part: str, edit: Edit, untouched: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "estimator": {"advantages": vandal_estimator(edit)},
        "reduction": {"reduction": partial(vandal_reduction, edit)},
    }.get(part, {"loss": vandal_loss(edit, part)})
    assert raw(logged(tmp_path, **options)) == raw(untouched)


@ways
def test_no_logged_loss_depends_on_edits_by_a_hook_or_an_observer(
    edit: Edit, untouched: dict[str, dict[int, float]], tmp_path: Path
) -> None:
    for number, callback in enumerate((VandalHook(edit), vandal("observe_step", edit), vandal("observe", edit))):
        (folder := tmp_path / str(number)).mkdir()
        assert logged(folder, callback) == untouched
