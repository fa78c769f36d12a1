"""``python -m tests.goldens FOLDER``: prints a table per algorithm and exits 1 if a case failed."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' own import path, as under pytest
    from goldens.command import main

    sys.exit(main(sys.argv[1:]))
