"""Learning-rate schedules by hand."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rl import adamw_8bit, warmup_then_linear


def rates(warmup: int, total: int, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = warmup_then_linear(warmup, total)(optimizer)
    found = []
    for _ in range(steps):
        found.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return found


def test_without_warmup_the_rate_falls_from_full_to_zero() -> None:
    assert rates(0, 4, 6) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(("warmup", "total"), [(1, 4), (2, 4), (5, 50), (4, 5)])
def test_it_goes_up_over_the_warmup_and_then_down_in_equal_steps_to_zero(warmup: int, total: int) -> None:
    found = torch.tensor(rates(warmup, total, total + 2), dtype=torch.float64)
    after = found[warmup : total + 1]
    torch.testing.assert_close(after.diff(), after.diff()[:1].expand(total - warmup), rtol=0, atol=1e-12)
    assert found[total:].tolist() == [0.0, 0.0] and (after.diff() < 0).all() and (found[:total] > 0).all()


@pytest.mark.parametrize(("warmup", "total"), [(2, 4), (5, 50), (4, 5)])
def test_the_warmup_is_linear_and_reaches_the_full_rate(warmup: int, total: int) -> None:
    expected = [(step + 1) / warmup for step in range(warmup)]
    assert rates(warmup, total, warmup) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(4, 4), (5, 4)])
def test_a_warmup_that_does_not_fit_is_refused(warmup: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"total optimizer steps, got warmup={warmup} and total={total}"):
        warmup_then_linear(warmup, total)


@pytest.mark.parametrize(("warmup", "total"), [(-1, 4), ("1", 4), (0, "4"), (0.1, 4)])
def test_a_warmup_that_is_no_number_of_steps_is_refused(warmup: Any, total: Any) -> None:
    with pytest.raises(ValueError, match=r"expected (warmup|total) to be a whole number of at least 0, got"):
        warmup_then_linear(warmup, total)


def test_8_bit_states_come_from_bitsandbytes_or_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match=r"lightning-rl\[bitsandbytes\]"):
        adamw_8bit()
    stand_in = SimpleNamespace(optim=SimpleNamespace(AdamW8bit=torch.optim.AdamW))
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)
    optimizer = adamw_8bit(lr=0.25, weight_decay=0.5)([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.25, 0.5)
