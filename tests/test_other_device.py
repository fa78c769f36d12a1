"""Code that usually runs on a GPU, on a stand-in: it mixes no devices and equals the CPU."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.other_device import OTHER, Copy, other_device, trainer_options
from kit.support import (
    an_algorithm,
    fit,
    ragged_rollout,
    tiny_model,
    tiny_module,
    tiny_prompts,
    weights_of,
)
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from properties.exports import (
    CORRECTIONS,
    ESTIMATOR_EXAMPLES,
    LOSS_EXAMPLES,
    REDUCTION_EXAMPLES,
    VALUE_EXAMPLES,
    correction_examples,
    quick_corrections,
)
from torch import Tensor

from lightning_rl import GRPO, RLCallback, RLLightningModule, Rollout
from lightning_rl.algorithm import Algorithm
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import (
    DynamicSampling,
    EntropyBonus,
    NoEOSMask,
    OutlierMask,
    OverlongPenalty,
    ReferenceKL,
    RolloutKL,
    TruncatedIS,
)
from lightning_rl.corrections import OUTPUTS, Corrections, Stat
from lightning_rl.corrections.stat import stack_moments
from lightning_rl.metrics import MetricLog
from lightning_rl.policy import Outputs, PolicyModel
from lightning_rl.policy.model import FrozenModel
from lightning_rl.policy.plan import plan_of_rows
from lightning_rl.recording import RolloutRecorder
from lightning_rl.reporting import RolloutSummary, RunReport, SampleTable
from lightning_rl.rollout import GREEDY_SCORE, SUM_PI_SQUARED, segments_of
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.rollouts.logprob_passes import add_logprobs
from lightning_rl.update import accumulate_gradient, from_table
from lightning_rl.utils.device import to_device

CUT = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
Numbers = dict[str, Tensor]
on_the_stand_in = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU notes no copies")


def a_rollout() -> Rollout:
    """Return a rollout with every field that estimators and corrections read."""
    rollout = ragged_rollout(dtype=torch.float64).sanitize()
    turns = torch.where(rollout.action_mask, 1, 0)
    sums = torch.where(rollout.valid_tokens, 0.3, 0.0).double()
    teacher = 0.9 * rollout.require("ref_logprobs")
    return rollout.replace(
        segments=segments_of(turns, rollout.response_lengths),
        token_extras={SUM_PI_SQUARED: sums, "teacher_logprobs": teacher},
        extras={GREEDY_SCORE: torch.full((len(rollout),), 0.5).double()},
    )


def numbers_of(stats: Mapping[str, Stat]) -> Numbers:
    return {name: stat.moments.cpu() for name, stat in stats.items()}


def signal_of(algorithm: Algorithm, device: torch.device | str) -> tuple[Rollout, Numbers]:
    """The rollout with its signal, and all that is logged of it."""
    corrections, rollout = algorithm.corrections, a_rollout().to(device)
    bonus = corrections.reward_bonus(rollout)
    rollout = rollout.replace(rewarded=rollout.rewarded & corrections.reward_mask(rollout))
    kept = corrections.keep_groups(rollout)
    rollout, excluded = exclude_rows(rollout.replace(trained=rollout.trained & kept), corrections)
    rollout, _, stats = estimate_signal(rollout, algorithm.advantages, corrections)
    corrections.observe(rollout)
    numbers = numbers_of({**excluded, **stats, **corrections.rollout_metrics(rollout)})
    return rollout, numbers if bonus is None else {**numbers, "bonus": bonus.cpu()}


def step_of(algorithm: Algorithm, device: torch.device | str) -> Numbers:
    """All numbers of a rollout's signal and of an optimizer step on a table of outputs."""
    rollout, numbers = signal_of(algorithm, device)
    plan = plan_of_rows(a_rollout(), [CUT]).to(device)
    noise = 0.1 * torch.sin(torch.arange(rollout.response_ids.numel(), device=device).double())
    leaf = (rollout.require("old_logprobs") + noise.reshape(rollout.response_ids.shape)).detach().requires_grad_()
    values = leaf.detach() * 0.5

    def table(microbatch: Any) -> Outputs:
        further = {spec.output: leaf.exp() for spec in OUTPUTS if spec.inputs}
        return from_table(Outputs(leaf * 1, leaf.square() + 0.1, values, **further))(microbatch)

    gradient = accumulate_gradient(rollout, plan.step(0), table, algorithm, backward=lambda loss: loss.backward())
    assert leaf.grad is not None
    metrics = gradient.metrics(1, norm=leaf.grad.norm(), optim__lr=0.1)
    log = MetricLog(device)
    for stats in gradient.stats:
        log.add("microbatch", stats)
    log.add("step", {**metrics, "time/update": Stat.single(1.0)})
    row = {name: torch.tensor(value) for name, value in log.row().items()}
    return {**numbers, **row, "gradient": leaf.grad.cpu(), "advantages": rollout.require("advantages").cpu()}


def assert_the_same_there(
    numbers_on: Callable[[torch.device | str], Numbers], *, bound: float | None = None
) -> list[Copy]:
    """Compares what the CPU says with what the other device does; returns the copies between them."""
    ours = numbers_on("cpu")
    with other_device() as copies:
        theirs = numbers_on(OTHER)
    assert ours.keys() == theirs.keys()
    for name, number in ours.items():
        torch.testing.assert_close(theirs[name], number, equal_nan=True, rtol=bound, atol=bound)
    return copies


EXAMPLES: dict[str, Mapping[str, Any]] = {
    "loss": LOSS_EXAMPLES,
    "advantages": ESTIMATOR_EXAMPLES,
    "reduction": REDUCTION_EXAMPLES,
    "value_loss": VALUE_EXAMPLES,
}


@pytest.mark.parametrize(
    ("option", "name"),
    [
        pytest.param(option, name, marks=[pytest.mark.nightly] if "-" in name else [])
        for option, examples in EXAMPLES.items()
        for name in examples
    ],
)
def test_every_part_of_an_algorithm_is_the_same_on_another_device(option: str, name: str) -> None:
    assert_the_same_there(lambda device: step_of(an_algorithm(**{option: EXAMPLES[option][name]}), device))


WITHOUT_A_FIT = [one for one in quick_corrections() if "forward_context" not in CORRECTIONS[one.values[0]].contributes]


@pytest.mark.parametrize("place", WITHOUT_A_FIT)
def test_every_correction_is_the_same_on_another_device(place: int) -> None:
    def numbers_on(device: torch.device | str) -> Numbers:
        return step_of(an_algorithm([correction_examples()[place]]), device)

    assert_the_same_there(numbers_on)


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_models_are_the_same_on_another_device(family: str, dtype: torch.dtype, packed: bool) -> None:
    def numbers_on(device: torch.device | str) -> Numbers:
        model, rollout = tiny_model(family, dtype=dtype), ragged_rollout(dtype=torch.float64).sanitize()
        policy = PolicyModel(model, model, temperature=0.7, packed=packed).to(device)
        model.tie_weights()  # which a move to the stand-in parts
        reference = FrozenModel(tiny_model(family, 1, dtype=dtype), temperature=0.7, packed=packed)
        reference.to(torch.device(device))
        plan = plan_of_rows(rollout, [CUT], packed=packed).to(device)
        scored = add_logprobs(rollout.to(device), plan, policy, reference, Corrections(), old=True, squares=True)
        scored = scored.replace(returns=scored.require("advantages"))
        algorithm = an_algorithm([EntropyBonus(0.1), ReferenceKL(0.1, as_loss=True)])
        accumulate_gradient(
            scored, plan.step(0), lambda m: policy(m.layout), algorithm, backward=lambda loss: loss.backward()
        )
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        norm = torch.stack([gradient.double().norm().cpu() for gradient in gradients]).norm()
        names = ("old_logprobs", "ref_logprobs", "values")
        numbers = {name: scored.require(name).cpu() for name in names}
        return {**numbers, "norm": norm} if dtype == torch.float64 else numbers

    if dtype == torch.float64:
        # Rotary embeddings and norms compute in float32, which a GPU rounds differently.
        assert_the_same_there(numbers_on, bound=1e-6 if torch.cuda.is_available() else None)
    else:  # rounded in other places: the head's products are not, on a GPU
        with other_device():
            assert all(bool(torch.isfinite(number).all()) for number in numbers_on(OTHER).values())


def fit_there(
    module: Callable[[], RLLightningModule], callbacks: Callable[[], list[Callback]], prompts: int = 16, **options: Any
) -> list[Copy]:
    """A fit on the CPU and one on the other device, with the same weights at their end; returns its copies."""
    weights = list[dict[str, Tensor]]()

    def train(**where: Any) -> None:
        ours = module()
        data = tiny_prompts(prompts)
        fit(ours, callbacks=callbacks(), data=data, **{"precision": "64-true", **options, **where})
        weights.append({name: weight.cpu() for name, weight in weights_of(ours).items()})

    train()
    with other_device() as copies:
        train(**trainer_options())
    first, second = weights
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight)
    return copies


def everyday() -> list[RLCallback]:
    return [
        NoEOSMask(),
        OverlongPenalty(8, 2),
        ReferenceKL(0.02, as_loss=True),
        RolloutKL(0.1),
        EntropyBonus(0.01),
        TruncatedIS(),
        OutlierMask(),
    ]


@pytest.mark.nightly
def test_a_fit_with_its_watchers_is_the_same_on_another_device(tmp_path: Path) -> None:
    audit = SignalAudit(1, "raise")

    def callbacks() -> list[Callback]:
        watchers = [SignalLedger(), RolloutRecorder(tmp_path, 1), SampleTable(1), RolloutSummary(), RunReport(1)]
        return [*everyday(), *watchers, audit]

    fit_there(lambda: tiny_module(minibatches_per_rollout=2), callbacks, 4, logger=CSVLogger(tmp_path))
    assert audit.findings == []


@pytest.mark.nightly
def test_a_fit_with_a_critic_is_the_same_on_another_device() -> None:
    fit_there(
        lambda: tiny_module(critic="shared", advantages="gae", minibatches_per_rollout=2),
        lambda: [EntropyBonus(0.01), SignalAudit(1, "raise")],
    )


@pytest.mark.nightly
def test_a_fit_with_refills_and_filters_is_the_same_on_another_device() -> None:
    fit_there(
        lambda: tiny_module(top_k=5, top_p=0.9, advantages=GRPO()),
        lambda: [DynamicSampling(max_rounds=8), SignalAudit(1, "raise")],
        64,
        max_steps=2,
    )


@on_the_stand_in
def test_a_rollout_and_its_plan_go_there_through_pinned_memory_and_nobody_waits() -> None:
    rollout = a_rollout()
    plan = plan_of_rows(rollout, [CUT], packed=False)
    with other_device() as copies:
        moved, there = rollout.to(OTHER), plan.to(OTHER)
        assert torch.equal(moved.rewards.cpu(), rollout.rewards)
        assert len(copies) > len(rollout.tensors())
        assert {(copy.pinned, copy.non_blocking) for copy in copies if not copy.to_host} == {(True, True)}
        assert {copy.non_blocking for copy in copies if copy.to_host} == {False}
        layout = there.step(0)[0].layout
        assert torch.equal(layout.position_ids.cpu(), plan.step(0)[0].layout.position_ids)


@pytest.mark.nightly
@on_the_stand_in
def test_no_fit_leaves_a_copy_to_the_host_unwaited_for() -> None:
    with other_device() as copies:
        fit(tiny_module(), callbacks=everyday(), data=tiny_prompts(8), **trainer_options())
    assert any(copy.pinned and copy.non_blocking for copy in copies)
    assert not any(copy.to_host and copy.non_blocking for copy in copies)
    assert all(copy.pinned for copy in copies if copy.non_blocking)


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, "cpu") is tensor


def test_statistics_of_both_devices_merge_in_their_order() -> None:
    numbers = [Stat.single(float(place)) for place in range(4)]
    expected = stack_moments(numbers, "cpu")
    with other_device():
        mixed = [Stat(one.moments.to(OTHER)) if place % 2 else one for place, one in enumerate(numbers)]
        for device in ("cpu", OTHER):
            assert torch.equal(stack_moments(mixed, device).cpu(), expected)


@on_the_stand_in
@pytest.mark.parametrize(
    "mix",
    [
        lambda there: there + torch.ones(3),
        lambda there: torch.stack([there, torch.ones(3)]),
        lambda there: torch.where(there > 0, there, torch.zeros(3)),
        lambda there: there.numpy(),
        lambda there: torch.rand(3, generator=torch.Generator(), device=there.device),
        lambda there: torch.ones(3)[there.long()],
    ],
    ids=["a sum", "a stack", "a choice", "an array", "a generator", "an index"],
)
def test_the_stand_in_refuses_what_a_gpu_refuses(mix: Callable[[Tensor], Any]) -> None:
    with other_device(), pytest.raises((RuntimeError, TypeError), match=r"device|cuda"):
        mix(torch.ones(3).to(OTHER))
