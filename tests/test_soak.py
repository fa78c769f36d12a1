"""A short soak: nothing grows over 200 rollouts with every kind of callback; ``make soak`` runs 2,000."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from soak import MAX_SLOPE, Look, Watch, growth, soak

pytestmark = pytest.mark.filterwarnings("ignore")


def growth_in(folder: Path) -> dict[str, float]:
    """Over 200 rollouts."""
    return growth(soak(200, folder))


@pytest.mark.slow
def test_nothing_grows_over_two_hundred_rollouts(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # what other tests have left may grow or end meanwhile
        grown = alone.submit(growth_in, tmp_path).result()
    assert {name: max(0, grown[name]) for name in ("descriptors", "threads", "processes", "files")} == {
        "descriptors": 0,
        "threads": 0,
        "processes": 0,
        "files": 0,
    }
    assert grown["memory"] <= 4 * MAX_SLOPE, "of so few rollouts the slope is known to a few MiB"


def test_growth_is_measured_after_the_warm_up() -> None:
    watch = Watch(Path())
    for rollout in range(0, 110, 10):
        leak = 0.02 * max(rollout - 20, 0)
        watch.looks.append(Look(rollout, 100 + leak, 5 + rollout // 60, 2, 0, 0))
    watch.seconds = [0.1] * 80 + [0.2] * 20
    grown = growth(watch)
    assert grown["memory"] == pytest.approx(2.0) and grown["descriptors"] == 1 and grown["threads"] == 0
    assert grown["slower"] == pytest.approx(2.0)
