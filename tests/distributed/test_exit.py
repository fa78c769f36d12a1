"""The end of a process: no thread of a process group outlives it and asks for an interpreter that is gone."""

import atexit
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_rl.distributed import Collectives
from lightning_rl.distributed.collectives import end_at_exit


def gloo_threads() -> list[str]:
    """Names of the threads of this process that belong to gloo."""
    names = list[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end between its listing and its reading
            names.append(task.joinpath("comm").read_text().strip())
    return [name for name in names if "gloo" in name]


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux lists them")
def test_the_threads_of_every_group_end_before_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit, before = list[Callable[[], Any]](), len(gloo_threads())  # of groups of earlier tests
    monkeypatch.setattr(atexit, "register", at_exit.append)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    end_at_exit()
    assert Collectives(layers=dist.group.WORLD).share("said beside the strategy's own group")
    assert len(gloo_threads()) > before
    (end,) = at_exit
    end()
    assert len(gloo_threads()) <= before and not dist.is_initialized()
