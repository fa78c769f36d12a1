"""The plan: a simulation by hand, lengths by lot and out of recordings, and what the command says."""

import math
from pathlib import Path
from statistics import fmean

import pytest
from kit.support import fit, recorder, tiny_module, tiny_prompts

from lightning_rl import Rollout
from lightning_rl.cli.main import main
from lightning_rl.cli.plan import Forecast, Load, best, drawn_lengths, forecast, recorded_lengths
from lightning_rl.generation.paced import Pace
from lightning_rl.recording import RolloutRecorder

ONE = Pace(devices=1, slots=8, fixed=1.0, each=0.0)  # a second for each token, however many are decoded
EVEN = Load(lengths=[[10, 10]] * 24, step_seconds=5.0, sync_seconds=1.0)


@pytest.mark.parametrize(
    ("load", "max_staleness", "concurrent", "idle", "seconds"),
    [
        pytest.param(EVEN, 0, True, 10, 16, id="synchronous"),
        pytest.param(EVEN, 1, True, 5, 11, id="the-next-one-during-a-step"),
        pytest.param(EVEN, 2, True, 0, 6, id="two-at-once"),
        pytest.param(EVEN, 2, False, 5, 11, id="two-one-after-the-other"),
        pytest.param(EVEN, 4, True, 0, 6, id="more-than-needed"),
    ],
)
def test_the_timeline_by_hand(load: Load, max_staleness: int, *, concurrent: bool, idle: float, seconds: float) -> None:
    found = forecast(load, ONE, max_staleness, concurrent=concurrent)
    assert found.seconds == pytest.approx(seconds) and found.idle == pytest.approx(idle / seconds)


def test_a_long_answer_goes_on_through_syncs_and_holds_up_its_own_rollout_alone() -> None:
    lengths = [[30 if number == 6 else 1, 1] for number in range(24)]
    load = Load(lengths=lengths, step_seconds=5.0)
    behind = forecast(load, ONE, 4)
    assert behind.idle * behind.seconds * 15 == pytest.approx(30 - 4 * 5), "asked for four steps before it is needed"


def test_too_few_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 10 rollouts for max_staleness=4, got 9"):
        forecast(Load(lengths=[[1]] * 9, step_seconds=1.0), ONE, 4)


def test_lengths_by_lot_have_the_mean_and_the_spread_that_are_asked_for() -> None:
    lengths = [
        length for rollout in drawn_lengths(2000, 5, mean=500, sigma=0.8, limit=10**9, seed=0) for length in rollout
    ]
    logs = [math.log(length) for length in lengths]
    spread = math.sqrt(fmean((log - fmean(logs)) ** 2 for log in logs))
    assert fmean(lengths) == pytest.approx(500, rel=0.05) and spread == pytest.approx(0.8, rel=0.03)
    assert drawn_lengths(3, 2, mean=7, sigma=0.0, limit=5, seed=1) == [[5, 5, 5]] * 2


def test_lengths_out_of_recordings_are_those_of_the_run(tmp_path: Path) -> None:
    rollouts = list[Rollout]()
    fit(tiny_module(), callbacks=[RolloutRecorder(tmp_path, 1), recorder(rollouts)("seen")], data=tiny_prompts(8, 4))
    assert recorded_lengths(tmp_path) == [rollout.drawn_lengths.tolist() for rollout in rollouts]
    with pytest.raises(ValueError, match=r"expected recordings of RolloutRecorder in .* got none"):
        recorded_lengths(tmp_path / "nothing")


def test_of_plans_that_cost_the_same_the_least_stale_is_the_best() -> None:
    def plan(devices: int, max_staleness: int, seconds: float) -> Forecast:
        return Forecast(devices=devices, max_staleness=max_staleness, idle=0.0, seconds=seconds)

    fresh, stale, dear = plan(2, 2, 10.2), plan(2, 4, 10.0), plan(9, 0, 10.0)
    assert best([stale, dear, fresh], training_devices=2) is fresh


def test_the_command_says_what_to_take(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "16", "--mean-tokens", "100", "--sigma", "1.2", "--max-tokens", "800", "--slots", "16"]
    speeds = ["--step-seconds", "4", "--tokens-per-second", "400", "--training-devices", "2"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *sizes, *speeds, "--generation-devices", "1", "2", "--max-staleness", "0", "2"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "16 responses a rollout" in said and "400 tokens/s" in said
    rows = [line.split()[:2] for line in said.splitlines() if line.strip()[:1].isdigit() and "%" in line][:4]
    assert rows == [["1", "0"], ["1", "2"], ["2", "0"], ["2", "2"]]
    assert "for each training device) with max_staleness=2" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step-seconds", "0", "--tokens-per-second", "1"], "expected step_seconds > 0"),
        (["--step-seconds", "1", "--tokens-per-second", "-1"], "expected tokens_per_second > 0"),
        (["--step-seconds", "1", "--tokens-per-second", "9", "--max-staleness", "-1"], "expected max_staleness"),
        (["--step-seconds", "1", "--tokens-per-second", "9", "--recordings", "nowhere"], "expected recordings"),
        (["--step-seconds", "1", "--tokens-per-second", "1e300"], "expected tokens_per_second <= 1e"),
        (["--step-seconds", "1", "--tokens-per-second", "9", "--generation-devices", "200000"], "at most 100000 gen"),
        (["--step-seconds", "1", "--tokens-per-second", "9", "--", "more"], "expected no further options, got more"),
    ],
)
def test_options_that_are_out_of_range_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["plan", *options])


def test_a_trainer_that_takes_no_time_has_no_more_devices_than_responses(capsys: pytest.CaptureFixture[str]) -> None:
    work = ["--samples", "4", "--max-tokens", "9", "--rollouts", "2", "--max-staleness", "0", "1"]
    with pytest.raises(SystemExit):
        main(["plan", "--step-seconds", "1e-9", "--tokens-per-second", "9", *work])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert {row[0] for row in rows} == {"8"}, "four responses each of two rollouts are in flight"


def test_a_length_that_no_number_holds_is_cut_off_at_the_limit() -> None:
    assert drawn_lengths(8, 2, mean=1e308, sigma=2.0, limit=50, seed=0) == [[50] * 8] * 2
