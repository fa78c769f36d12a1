"""Ledger: the sampled data equals the used data plus that of each stage, for every partition."""

import logging
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.support import (
    callback_of,
    fit,
    ragged_rollout,
    rollout_of,
    tiny_module,
    tiny_prompts,
    view_of_rollout,
    weights_of,
)
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import AdamW

from lightning_rl import GRPO, FinishReason, RLCallback, Rollout
from lightning_rl.audit import SignalAudit, SignalLedger
from lightning_rl.callbacks import OPSM, DynamicSampling, IcePop, NoEOSMask, TruncatedIS
from lightning_rl.corrections import Corrections
from lightning_rl.corrections.stat import merge_moments
from lightning_rl.distributed.threaded_ranks import ThreadedRanks
from lightning_rl.recording.accounting import sampling_stages, update_stages
from lightning_rl.rollouts.estimate_signal import estimate_signal, exclude_rows
from lightning_rl.signal.masked import local_sum
from lightning_rl.testing.properties.fixed_batch import judge_fixed_batch

UNITS = ("sequences", "tokens", "weight")


def kept(seen: Rollout, odds: int) -> Tensor:
    """Return a decision about rows that depends only on the sample id."""
    return (seen.sample_ids * 7919 + odds) % 5 != 0


def kept_tokens(seen: Rollout, odds: int) -> Tensor:
    position = torch.arange(seen.response_ids.shape[1])
    return (seen.sample_ids[:, None] * 31 + position * 17 + odds) % 7 != 0


def everyone(odds: int = 0) -> list[RLCallback]:
    """Return a callback for each stage, two for some."""
    return [
        callback_of("filter", keep_groups=lambda seen: (seen.groups + odds) % 4 != 3),
        callback_of("out", exclude=lambda seen: ~kept(seen, odds)),
        callback_of("mask_a", reward_mask=lambda seen: kept(seen, odds + 1)),
        callback_of("mask_b", reward_mask=lambda seen: kept(seen, odds + 2)),
        callback_of("rows", sequence_mask=lambda view: kept(view, odds + 3)),
        callback_of("tokens_a", token_mask=lambda view: kept_tokens(view, odds)),
        callback_of("tokens_b", token_mask=lambda view: kept_tokens(view, odds + 1)),
        callback_of("halved", token_weight=lambda view: torch.full_like(view.old_logprobs, 0.5)),
        callback_of("raised", token_weight=lambda view: kept_tokens(view, odds + 2) * 1.25),
    ]


def sampled_rollout(seed: int = 0, rows: int = 24) -> Rollout:
    """Return scored samples of a round, some of them aborted or without a reward."""
    whole = ragged_rollout(rows, seed=seed).replace(advantages=None, returns=None)
    place = torch.arange(rows)
    finish = torch.where(place % 11 == 5, FinishReason.ABORT, whole.finish.long()).to(torch.uint8)
    alive = finish != FinishReason.ABORT
    return whole.replace(finish=finish, trained=alive, rewarded=alive & (place % 13 != 7))


def finished_rollout(sampled: Rollout, callbacks: list[RLCallback]) -> Rollout:
    """Run the stages from sampling to the signal."""
    corrections = Corrections(callbacks)
    own = sampled.replace(rewarded=sampled.rewarded & corrections.reward_mask(sampled))
    own = own.select(corrections.keep_groups(own))
    return estimate_signal(exclude_rows(own, corrections)[0], GRPO(), corrections, local_sum)[0]


def figures(
    sampled: list[Rollout], callbacks: list[RLCallback], *, cuts: int = 1, passes: int = 1, drift: float = 0.4
) -> dict[str, float]:
    """Return the metrics of the ledger if each rank samples a rollout and trains in ``cuts`` microbatches."""
    ranks = ThreadedRanks(len(sampled))

    def logged(part: Rollout) -> list[dict[str, Any]]:
        ledger, module = SignalLedger(), tiny_module()
        module.run.algorithm = module.algorithm.replace(corrections=Corrections([*callbacks, ledger]))
        ledger.collectives = ranks
        ledger.on_fit_start(cast(Trainer, None), module)  # it does not use the Trainer
        ledger.observe_rewards(part, [])
        rollout = finished_rollout(part, callbacks)
        ledger.observe(rollout)
        stats = [dict(ledger.rollout_metrics(rollout))]
        for cut in torch.arange(len(rollout)).chunk(cuts) if cuts > 1 else [torch.arange(len(rollout))]:
            rows = rollout.select(cut[rollout.trained[cut]]).sanitize()
            moved = rows.require("old_logprobs") + drift * torch.sin(
                rows.sample_ids[:, None] + torch.arange(float(rows.width))
            )
            stats += [dict(ledger.metrics(view_of_rollout(rows, moved.requires_grad_())))] * passes
        return stats

    logged_by_rank = ranks.run([partial(logged, part) for part in sampled], threads=1)
    parts: dict[str, list[Tensor]] = {}
    for stats in (stats for rank in logged_by_rank for stats in rank):
        for name, stat in stats.items():
            parts.setdefault(name, []).append(stat.moments)
    merged = {name: merge_moments(torch.stack(moments)) for name, moments in parts.items()}
    return {
        name: float(moments[1] * (moments[0] if name.endswith("/sampled") else 1)) for name, moments in merged.items()
    }


def stages(callbacks: list[RLCallback]) -> list[str]:
    corrections = Corrections(callbacks)
    return [*sampling_stages(corrections), *update_stages(corrections)]


def test_each_row_and_token_is_charged_to_the_first_that_takes_it() -> None:
    sampled = rollout_of(
        rewards=[1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0],
        tokens=[[1, 1]] * 10,
        groups=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
        finish=[0, 0, 0, 0, FinishReason.ABORT, 0, 0, 1, 0, 0],
        trained=[True] * 4 + [False] + [True] * 5,
        rewarded=[True] * 4 + [False] + [True] * 5,
        old_logprobs=torch.full((10, 2), -1.0),
    )
    callbacks = [
        callback_of("filter", keep_groups=lambda seen: seen.groups != 0),  # rows 0 and 1
        NoEOSMask(),  # row 7, so row 6 is the only one of its group
        callback_of("first_row", sequence_mask=lambda view: view.sample_ids != 108),
        callback_of("first_token", token_mask=lambda view: torch.tensor([False, True]).expand_as(view.valid_tokens)),
        callback_of("weight", token_weight=lambda view: torch.full_like(view.old_logprobs, 0.75)),
    ]
    found = figures([sampled], callbacks, drift=0.0)
    shares = {name.removeprefix("ledger/tokens/"): share for name, share in found.items() if "/tokens/" in name}
    assert shares == {
        "sampled": 20.0,
        "filter.keep_groups": 0.2,
        "aborted": pytest.approx(0.1),
        "unscored": 0.0,
        "no_eos_mask.exclude": 0.0,
        "no_eos_mask.reward_mask": pytest.approx(0.1),
        "zero_advantage": pytest.approx(0.4),
        "first_row.sequence_mask": pytest.approx(0.1),
        "first_token.token_mask": pytest.approx(0.05),
        "weight.token_weight": 0.0,
        "clip": 0.0,
        "used": pytest.approx(0.05),
    }
    assert found["ledger/weight/weight.token_weight"] == pytest.approx(0.05 / 4)
    assert found["ledger/weight/used"] == pytest.approx(0.05 * 0.75)
    assert found["ledger/sequences/used"] == pytest.approx(0.1)


@settings(max_examples=25)
@given(seed=st.integers(0, 50), odds=st.integers(0, 6))
def test_what_was_sampled_is_what_was_used_plus_what_each_stage_took(seed: int, odds: int) -> None:
    callbacks = everyone(odds)
    found = figures([sampled_rollout(seed)], callbacks)
    for unit in UNITS:
        lost = sum(found[f"ledger/{unit}/{stage}"] for stage in stages(callbacks))
        assert lost + found[f"ledger/{unit}/used"] == pytest.approx(1.0, abs=1e-12)


def test_the_order_of_the_callbacks_changes_nothing() -> None:
    sampled = sampled_rollout()
    assert figures([sampled], everyone()[::-1]) == figures([sampled], everyone())


@pytest.mark.parametrize(("cuts", "passes"), [(2, 1), (5, 1), (1, 3), (4, 2)])
def test_the_cut_into_microbatches_and_the_number_of_passes_change_nothing(cuts: int, passes: int) -> None:
    sampled = sampled_rollout()
    found = figures([sampled], everyone(), cuts=cuts, passes=passes)
    assert found == pytest.approx(figures([sampled], everyone()), abs=1e-12)


@pytest.mark.parametrize("first", [3, 12, 21])
def test_the_split_over_ranks_changes_nothing(first: int) -> None:
    sampled = sampled_rollout()
    halves = [sampled.select(torch.arange(first)), sampled.select(torch.arange(first, 24))]
    assert figures(halves, everyone()) == pytest.approx(figures([sampled], everyone()), abs=1e-12)


@pytest.mark.parametrize(("rewards", "clipped"), [([1.0, 0.0], 0.0), ([0.0, 1.0], 1.0)])
def test_tokens_behind_the_clip_are_charged_to_it(rewards: list[float], clipped: float) -> None:
    sampled = rollout_of(rewards=rewards, tokens=[[1], [1]], old_logprobs=torch.full((2, 1), -1.0))
    found = figures([sampled], [], drift=3.0)  # times the sines of 100 and 101: the first ratio falls, the second rises
    assert (found["ledger/tokens/clip"], found["ledger/weight/clip"]) == (clipped, clipped)
    assert found["ledger/weight/used"] == 1 - clipped


CORRECTIONS = [DynamicSampling(max_rounds=3), TruncatedIS(), IcePop(0.9, 1.1), OPSM(1e-3), NoEOSMask()]
OPTIONS: dict[str, Any] = {"minibatches_per_rollout": 2, "epochs_per_rollout": 2, "optimizer": partial(AdamW, lr=3e-2)}
quiet = pytest.mark.filterwarnings("ignore:.*groups are missing:UserWarning")


@pytest.mark.nightly
@quiet
def test_a_run_with_the_ledger_ends_with_the_same_weights() -> None:
    modules = [tiny_module(**OPTIONS) for _ in range(2)]
    fit(modules[0], callbacks=CORRECTIONS, data=tiny_prompts(12, 4))
    fit(modules[1], callbacks=[SignalLedger(), *CORRECTIONS], data=tiny_prompts(12, 4))
    one, other = map(weights_of, modules)
    assert all(torch.equal(one[name], other[name]) for name in one)


@quiet
def test_every_logged_row_adds_up_and_the_table_shows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        fit(
            tiny_module(**OPTIONS),
            callbacks=[*CORRECTIONS, SignalLedger(2)],
            data=tiny_prompts(12, 4),
            logger=logger,
            log_every_n_steps=4,
        )
    names, *rows = [line.split(",") for line in (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()]
    assert len(rows) == 3
    logged: dict[str, float] = {}
    for row in rows:
        logged = {
            name: float(value) for name, value in zip(names, row, strict=True) if name.startswith("ledger/") and value
        }
        for unit in UNITS:
            shares = [
                value for name, value in logged.items() if name.startswith(f"ledger/{unit}/") and "sampled" not in name
            ]
            assert sum(shares) == pytest.approx(1.0, abs=1e-9)
    tables = [record.message for record in caplog.records if "dynamic_sampling.keep_groups" in record.message]
    assert [table.split()[:2] for table in tables] == [["rollout", "0"], ["rollout", "2"]]
    assert f"{100 * logged['ledger/weight/used']:.1f} %" == tables[-1].splitlines()[-1][-6:].strip()


@quiet
def test_the_audit_has_nothing_to_say_about_the_ledger() -> None:
    audit = SignalAudit(1, "raise")
    fit(tiny_module(**OPTIONS), callbacks=[NoEOSMask(), SignalLedger(), audit], data=tiny_prompts(8, 4))
    assert audit.findings == []


def test_a_checkpoint_within_a_rollout_holds_its_totals(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    ledgers = [SignalLedger(), SignalLedger()]
    with pytest.warns(UserWarning, match="pre-optimization state"):
        fit(
            tiny_module(**OPTIONS),
            callbacks=[ledgers[0], saving],
            data=tiny_prompts(4, 4),
            max_steps=3,
            enable_checkpointing=True,
        )
    saved = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    ledgers[1].load_state_dict(saved["callbacks"]["ledger"])
    assert ledgers[1].totals == ledgers[0].totals
    assert ledgers[1].totals.tokens > 1


def test_a_frequency_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="expected every_n_rollouts to be a whole number above 0, got 0"):
        SignalLedger(0)


def test_the_checks_before_a_run_do_not_skip_because_of_a_ledger() -> None:
    ledger = SignalLedger()
    verdict = judge_fixed_batch(tiny_module().algorithm, [ledger])
    assert not [why for why in verdict.skipped.values() if "ledger" in why]
    with pytest.raises(RuntimeError, match="no fit has begun"):
        ledger.observe_rewards(ragged_rollout(), [])


def test_rollouts_that_were_generated_ahead_add_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        module = tiny_module(**{**OPTIONS, "max_staleness": 1})
        fit(module, callbacks=[NoEOSMask(), TruncatedIS(), SignalLedger()], data=tiny_prompts(12, 4))
    tables = [record.message for record in caplog.records if record.message.startswith("rollout ")]
    assert [table.split()[1] for table in tables] == ["0", "1", "2"]
    assert all(table.splitlines()[1].split()[:2] == ["sampled", "16"] for table in tables)
