"""``lightning-rl ray`` on nodes of a real Ray on this machine."""

import subprocess
import sys
import time
from pathlib import Path


class RayCommand:
    """The command with a script in a folder."""

    def __init__(self, folder: Path, *arguments: str | Path, limit: float = 600.0) -> None:
        self.folder, self._output = folder, folder / "output"
        command = [sys.executable, "-m", "lightning_rl", "ray", *map(str, arguments)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        self._end = time.monotonic() + limit

    def wait_for(self, pattern: str) -> None:
        """Wait for a file in the folder."""
        while not any(self.folder.glob(pattern)):
            assert self._process.poll() is None and time.monotonic() < self._end, self.output()
            time.sleep(0.02)

    def finish(self) -> int:
        """Return the exit code."""
        try:
            return self._process.wait(self._end - time.monotonic())
        finally:
            self._process.kill()

    def output(self) -> str:
        """Return the end of the output."""
        return self._output.read_text(errors="replace")[-20000:]
