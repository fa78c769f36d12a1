"""A command: however it ends, none of its processes is left."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.processes.command import run_command

CHILDREN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(999)"], stdout=-1)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
sys.exit(0) if "ends" in sys.argv else child.wait()
"""
SERVING = """
import os, sys
from lightning_rl.processes import command
command.PATIENCE = 0.2
sys.exit(command.run_command([sys.executable, "-c", *sys.argv[1:]], os.environ))
"""


WRITING = "import os, sys; os.chdir(sys.argv[1]); open('file', 'w').close(); os.mkdir('folder')"


def test_no_other_user_may_open_what_it_makes(tmp_path: Path) -> None:
    assert run_command([sys.executable, "-c", WRITING, str(tmp_path)], os.environ) == 1
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"file": 0o600, "folder": 0o700}


def gone(pids: list[int]) -> bool:
    """Waits until none of the processes is there, by their descriptors."""
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([watched], [], [], 20)
        os.close(watched)
        if not ended:
            return False
    return True


@pytest.mark.parametrize(
    ("manner", "number", "code"),
    [
        pytest.param("", signal.SIGTERM, 0, id="sigterm"),
        pytest.param("", signal.SIGINT, 0, id="sigint"),
        pytest.param("deaf", signal.SIGTERM, 0, id="deaf-to-sigterm"),
        pytest.param("", signal.SIGKILL, -9, id="sigkill"),
        pytest.param("deaf", signal.SIGKILL, -9, id="deaf-and-sigkill"),
        pytest.param("ends", None, 1, id="ends-by-itself"),
    ],
)
def test_no_process_outlives_it(manner: str, number: signal.Signals | None, code: int) -> None:
    command = [sys.executable, "-c", SERVING, CHILDREN, manner]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as serving:
        assert serving.stdout is not None
        pids = [int(pid) for pid in serving.stdout.readline().split()]
        assert len(pids) == 2
        if number is not None:
            serving.send_signal(number)
        assert serving.wait(30) == code
    assert gone(pids)
