"""``Trainer(deterministic=True)``: a fit is bitwise equal to itself, and calls nothing that a GPU refuses then."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.nondeterministic import RefusesNondeterministic, check_refusals
from kit.support import an_algorithm, fit, ragged_rollout, tiny_module, weights_of
from properties.evaluation import signal_of
from torch import Tensor

from lightning_rl import FakeEngine, PromptDataModule
from lightning_rl.advantages import ESTIMATORS
from lightning_rl.callbacks import ReferenceKL
from lightning_rl.generation import Request
from lightning_rl.losses import LOSSES
from lightning_rl.policy import Outputs
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.testing.properties.rows import Row, rollout_of_rows
from lightning_rl.update import accumulate_gradient, from_table


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    """Puts back what the Trainer switches for the process."""
    yield
    torch.use_deterministic_algorithms(mode=False)


def of_one_length(request: Request) -> list[int]:
    return [2 + (request.sample_id + place) % 12 for place in range(request.sampling.max_new_tokens)]


RUNS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packing": False},
    "one length": {"engine": FakeEngine(of_one_length), "max_new_tokens": 16},  # which needs no packing
    "filters": {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "critic": {"advantages": "gae", "critic": "shared"},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_deterministic_fit_calls_nothing_that_a_gpu_refuses_and_repeats_itself_bitwise(
    options: dict[str, Any],
) -> None:
    ends = list[dict[str, Tensor]]()
    prompts = [[2 + place] if "engine" in options else [2] * place for place in range(1, 9)]
    for _ in range(2):
        module, data = tiny_module(**options), PromptDataModule(prompts, 4)
        with RefusesNondeterministic():
            fit(module, callbacks=[ReferenceKL(0.1, as_loss=True)], data=data, deterministic=True)
        ends.append(weights_of(module))
    assert all(torch.equal(ends[1][name], weight) for name, weight in ends[0].items())


@pytest.mark.parametrize("loss", LOSSES)
def test_no_loss_calls_what_a_gpu_refuses(loss: str) -> None:
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    logprobs = rollout.require("old_logprobs").clone().requires_grad_()
    step = plan_of_rows(rollout, [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]).step(0)
    table = from_table(Outputs(logprobs, torch.zeros_like(logprobs), None))
    with RefusesNondeterministic():
        accumulate_gradient(rollout, step, table, an_algorithm(loss=LOSSES[loss]), backward=Tensor.backward)
    assert logprobs.grad is not None


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_estimator_calls_what_a_gpu_refuses(estimator: str) -> None:
    rows = [Row(tokens=(True, False, True), prompt=row % 2, reward=row) for row in range(6)]
    with RefusesNondeterministic():
        found = ESTIMATORS[estimator](signal_of(rollout_of_rows(rows)))
    assert found.advantages.isfinite().all()


def test_what_is_refused_are_operations_of_this_pytorch() -> None:
    check_refusals()
    with RefusesNondeterministic(), pytest.raises(RuntimeError, match="does not have a deterministic"):
        torch.ones(3).cumsum(0)
    with RefusesNondeterministic():
        assert torch.ones(3, dtype=torch.int64).cumsum(0).tolist() == [1, 2, 3]
