"""Properties of every correction, with one example of each export."""

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from kit.host_reads import reads_within
from kit.support import an_algorithm, ragged_rollout, run_step, view_of_rollout
from properties.corrections import ACTS_ELSEWHERE, CHANGES_ON_POLICY, EXAMPLES, LOGGED_BY_THE_CORE
from torch import Tensor

import lightning_rl.callbacks
from lightning_rl import (
    GAE,
    ClippedSurrogate,
    FinishReason,
    LossTerm,
    LossView,
    PolicyLoss,
    Reinforce,
    RLCallback,
    Rollout,
)
from lightning_rl.corrections import CONTRIBUTIONS, OUTPUTS, Corrections
from lightning_rl.policy import Microbatch, Outputs
from lightning_rl.rollout import TOKEN
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.update import from_table

AT_LOSS = {"sequence_mask", "token_mask", "token_weight", "loss_term", "metrics"}
each = pytest.mark.parametrize("correction", EXAMPLES, ids=lambda correction: type(correction).__name__)


def whole_rollout(*, poison: float = 0.0, on_policy: bool = False) -> Rollout:
    """Ragged rows with drift and truncation; ``poison`` at every invalid token of every float field."""
    rollout = ragged_rollout(24, dtype=torch.float64)
    same, ref = rollout.require("old_logprobs"), rollout.require("ref_logprobs")
    rollout = rollout.replace(token_extras={"teacher_logprobs": same if on_policy else 0.9 * ref})
    if on_policy:
        rollout = rollout.replace(rollout_logprobs=same, ref_logprobs=same)

    def poison_tokens(tensor: Tensor, axis: object, _pad: float) -> Tensor:
        at_tokens = axis == TOKEN and tensor.is_floating_point()
        return torch.where(rollout.valid_tokens, tensor, poison) if at_tokens else tensor

    return rollout.map(poison_tokens)


def loss_of(correction: RLCallback) -> PolicyLoss:
    return Reinforce() if "token_weight" in correction.contributes else ClippedSurrogate()


def view_on(rollout: Rollout, *callbacks: RLCallback, drift: float = 1.0) -> LossView:
    """Return the view of the objective after the policy has moved away from the old one.

    Its entropy is above 0, and carries gradient if one of the callbacks trains it. The engine's KL is that of two
    normal distributions with these means.
    """
    position = torch.arange(rollout.width, dtype=torch.float64)
    noise = torch.sin(3.0 * rollout.sample_ids[:, None] + 5.0 * position)  # independent of other rows
    moved = (rollout.require("old_logprobs") + drift * noise / 4).detach().requires_grad_()
    entropy = 0.1 + moved.square()
    trained = any(callback.trains_entropy for callback in callbacks)
    missing = [one for one in callbacks if one.provides and not _has_fields_of(rollout, one)]
    rollout = Corrections([one for one in missing if "provide" in one.contributes]).provide(rollout)
    kl = (moved - rollout.require("rollout_logprobs")).square() / 2
    further = {spec.name: 2.0 * place + kl for place, spec in enumerate(one for one in OUTPUTS if one.inputs)}
    return view_of_rollout(rollout, moved).replace(entropy=entropy if trained else entropy.detach(), **further)


def _has_fields_of(rollout: Rollout, callback: RLCallback) -> bool:
    kept = {f"{field}/{key}" for field in ("extras", "token_extras") for key in getattr(rollout, field)}
    return set(callback.provides) <= kept


def finished(rollout: Rollout, *callbacks: RLCallback) -> Rollout:
    """The rollout through the stages between rewards and update."""
    corrections = Corrections(callbacks)
    rollout = rollout.replace(rewarded=rollout.rewarded & corrections.reward_mask(rollout))
    rollout = rollout.select(corrections.keep_groups(rollout))
    return estimate_signal(exclude_rows(rollout, corrections)[0], GAE(), corrections)[0]


def contributions_of(correction: RLCallback, rollout: Rollout) -> dict[str, Any]:
    """Everything that it contributes, at valid tokens alone."""
    found: dict[str, Any] = {}
    for method in sorted(
        correction.contributes - {"choose_rows", "observe", "observe_rewards", "forward_context"}
    ):  # which return nothing to compare
        given = getattr(correction, method)(view_on(rollout, correction) if method in AT_LOSS else rollout)
        given = given.per_token if isinstance(given, LossTerm) else given
        if isinstance(given, Tensor) and given.dim() == 2:
            given = given[rollout.valid_tokens]
        found[method] = (
            {key: getattr(one, "moments", one) for key, one in given.items()}
            if isinstance(given, dict)
            else given.detach()
        )
    return found


def everything(rollout: Rollout, *callbacks: RLCallback, loss: PolicyLoss, drift: float = 1.0) -> list[Tensor]:
    """Advantages, loss and gradient of a whole step."""
    done = finished(rollout, *callbacks)
    step = run_step(view_on(done, *callbacks, drift=drift), callbacks=callbacks, loss=loss)
    return [done.require("advantages"), step.loss, step.gradient]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_every_export_has_an_example() -> None:
    exported = {getattr(lightning_rl.callbacks, name) for name in lightning_rl.callbacks.__all__}
    assert {type(example) for example in EXAMPLES} == exported
    offered = set().union(*(example.contributes for example in EXAMPLES))
    assert offered <= set(CONTRIBUTIONS)


@each
def test_acts_off_policy_and_not_on_policy(correction: RLCallback) -> None:
    loss = loss_of(correction)
    off, on = whole_rollout(), whole_rollout(on_policy=True)
    acted = not equal(everything(off, correction, loss=loss), everything(off, loss=loss))
    assert acted != isinstance(correction, ACTS_ELSEWHERE)
    same = equal(everything(on, correction, loss=loss, drift=0.0), everything(on, loss=loss, drift=0.0))
    assert same != isinstance(correction, CHANGES_ON_POLICY)


@each
def test_logs_finite_scalars_under_its_file_name(correction: RLCallback) -> None:
    rollout = finished(whole_rollout(), correction)
    logged = run_step(view_on(rollout, correction), callbacks=[correction], loss=loss_of(correction)).metrics
    stats = Corrections([correction]).rollout_metrics(rollout)
    logged |= {name: float(stat.value()) for name, stat in stats.items()}
    file = type(correction).__module__.rpartition(".")[-1]
    assert correction.name == type(correction).name == file
    own = {name: value for name, value in logged.items() if name.startswith(f"{file}/")}
    assert bool(own) != isinstance(correction, LOGGED_BY_THE_CORE)
    assert all(math.isfinite(value) for value in own.values())


@each
def test_logs_the_same_keys_whatever_it_sees(correction: RLCallback) -> None:
    rollout = finished(whole_rollout(), correction)
    seen = [rollout, rollout.padding_rows(1), rollout.select(torch.arange(0)), rollout.select(torch.tensor([12]))]
    steps = [run_step(view_on(rows, correction), callbacks=[correction], loss=loss_of(correction)) for rows in seen]
    assert len({tuple(sorted(step.metrics)) for step in steps}) == 1
    assert len({tuple(Corrections([correction]).rollout_metrics(rows)) for rows in seen}) == 1


@each
def test_draws_no_global_random_numbers(correction: RLCallback) -> None:
    before = torch.get_rng_state()
    contributions_of(correction, whole_rollout())
    assert torch.equal(torch.get_rng_state(), before)


@each
def test_its_contributions_carry_no_gradient_but_that_of_its_term(correction: RLCallback) -> None:
    view = view_on(whole_rollout(), correction)
    for method in correction.contributes & {"sequence_mask", "token_mask", "token_weight"}:
        assert not getattr(correction, method)(view).requires_grad
    stats = correction.metrics(view).values() if "metrics" in correction.contributes else []
    assert not any(stat.moments.requires_grad for stat in stats)


@each
def test_names_its_source_and_reads_fields_that_exist(correction: RLCallback) -> None:
    module = inspect.getmodule(type(correction))
    assert module is not None and "Source: " in (module.__doc__ or "")
    assert all(hasattr(LossView, field.partition("/")[0]) for field in (*correction.reads, *correction.reads_at_loss))
    assert not {"sequence_mask", "token_mask"} & correction.contributes or correction.ratio is None


def test_the_examples_meet_truncated_rows_and_holes() -> None:
    rollout = whole_rollout()
    assert 0 < (rollout.finish == FinishReason.LENGTH).sum() < 24
    assert (rollout.action_mask.sum(-1) < rollout.response_lengths).any() and not rollout.valid_tokens.any(-1).all()


def test_none_waits_for_an_accelerator_between_microbatches() -> None:
    at_loss = [one for one in EXAMPLES if one.contributes & AT_LOSS and not isinstance(one, ACTS_ELSEWHERE)]
    corrections = [copy.copy(one).with_name(f"{one.name}{place}") for place, one in enumerate(at_loss)]
    rollout = whole_rollout().select(torch.arange(12))
    rollout = Corrections([one for one in corrections if "provide" in one.contributes]).provide(rollout)
    leaf = torch.zeros(rollout.response_ids.shape, device="meta", dtype=torch.float64, requires_grad=True)

    def table(microbatch: Microbatch) -> Outputs:
        further = {spec.output: leaf * 3 for spec in OUTPUTS if spec.inputs}
        return from_table(Outputs(leaf * 1, leaf * 2, **further))(microbatch)

    first, rest, _ = reads_within(rollout.sanitize(), table, an_algorithm(corrections, loss=Reinforce()))
    assert first + rest == []
