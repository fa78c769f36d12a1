"""A short soak with every kind of callback; ``make soak`` trains for 2,000 rollouts."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from soak import MAX_SLOPE, Look, Watch, growth, soak

pytestmark = pytest.mark.filterwarnings("ignore")


def growth_in(rollouts: int, folder: Path) -> dict[str, float]:
    return growth(soak(rollouts, folder))


@pytest.mark.nightly
def test_nothing_grows(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # objects of other tests would be counted here
        grown = alone.submit(growth_in, 200, tmp_path).result()
    for name in ("descriptors", "threads", "processes", "files"):
        assert grown[name] <= 0, name
    assert grown["memory"] <= 4 * MAX_SLOPE, "the slope of 200 rollouts is known to a few MiB"


def test_growth_is_measured_after_the_warm_up() -> None:
    watch = Watch(Path())
    for rollout in range(0, 110, 10):
        leak = 0.02 * max(rollout - 20, 0)
        watch.looks.append(Look(rollout, 100 + leak, 5 + rollout // 60, 2, 0, 0))
    watch.seconds = [0.1] * 80 + [0.2] * 20
    grown = growth(watch)
    assert grown["memory"] == pytest.approx(2.0) and grown["descriptors"] == 1 and grown["threads"] == 0
    assert grown["slower"] == pytest.approx(2.0)
