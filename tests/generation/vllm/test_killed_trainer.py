"""kill -9 of a trainer with two servers, which the resumed run uses again."""

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import killed_client
from kit.forks import PATH, Fork
from kit.scripted_server import ScriptedServer, servers

HOLDS: dict[str, Any] = {"architecture": "Qwen2ForCausalLM"}
LIMIT = 120  # seconds for anything


def start(folder: Path, staleness: int, urls: list[str]) -> Fork:
    folder.mkdir(exist_ok=True)
    (folder / "log").touch()
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PATH}
    return Fork(0, [killed_client.__file__, str(folder), str(staleness), *urls], environment, folder / "log")


def wait_for_start(process: Fork, folder: Path) -> None:
    end = time.monotonic() + LIMIT
    while not (folder / "started").exists():
        assert process.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-2000:]
        time.sleep(0.01)


def whole_run(folder: Path, staleness: int, urls: list[str]) -> tuple[Any, float]:
    """Return the result of an undisturbed run, and the seconds that it trained."""
    process = start(folder, staleness, urls)
    wait_for_start(process, folder)
    begin = time.monotonic()
    assert process.wait(LIMIT) == 0, (folder / "log").read_text()[-2000:]
    return torch.load(folder / "result"), time.monotonic() - begin


def kill_and_finish(folder: Path, staleness: int, urls: list[str], delay: float) -> Any:
    """Kill a run some time after training began, and start it again."""
    process = start(folder, staleness, urls)
    try:
        wait_for_start(process, folder)
        time.sleep(delay)
    finally:
        process.kill()
        process.wait(LIMIT)
    finished = (folder / "result").exists()
    left = [path.name for path in (folder / "storage").iterdir()]
    assert finished or len(left) == 2, "its weights and its lock"
    again = start(folder, staleness, urls)
    assert again.wait(LIMIT) == 0, (folder / "log").read_text()[-2000:]
    assert list((folder / "storage").iterdir()) == [], "neither its own weights nor those of the one that was killed"
    return torch.load(folder / "result")


def check(folder: Path, moments: int, staleness: int) -> None:
    """Kill runs at random moments, each in another folder, with the same two servers."""
    one, two = ScriptedServer(**HOLDS), ScriptedServer(**HOLDS)
    draw = random.Random(staleness)
    with servers(one, two):
        urls = [one.url, two.url]
        expected, seconds = whole_run(folder / "whole", staleness, urls)
        assert expected["steps"] == 16
        for number in range(moments):
            found = kill_and_finish(folder / str(number), staleness, urls, draw.random() * seconds)
            assert found["steps"] == expected["steps"]
            for name, weight in expected["weights"].items():
                assert torch.equal(found["weights"][name], weight), (number, name)
        assert len({body["request_id"].split("-")[0] for body in one.requests}) >= moments + 1, "each start is a run"
        assert one.requests and two.requests, "both took part"


@pytest.mark.nightly
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_trainer_that_is_killed_ten_times_with_two_servers_resumes_bitwise(staleness: int, tmp_path: Path) -> None:
    check(tmp_path, 10, staleness)
