"""The command line of the golden cases."""

from collections.abc import Sequence
from pathlib import Path

import torch

from goldens.cases import read_folder
from goldens.page import page
from goldens.report import table
from goldens.verdict import Status, Verdict, verdict

USAGE = "expected folders of golden cases: python -m tests.goldens FOLDER [FOLDER ...] [--page]"


def verdicts_on(folder: Path) -> list[Verdict]:
    """Replays every case of a folder."""
    return [verdict(case) for case in read_folder(folder)]


def main(arguments: Sequence[str]) -> int:
    """Prints the table, or with ``--page`` the section of docs/evidence.md; 1 if a case failed or there is none."""
    folders = [Path(one) for one in arguments if one != "--page"]
    if not folders or not all(folder.is_dir() for folder in folders):
        print(USAGE)  # noqa: T201
        return 2
    torch.set_num_threads(1)
    verdicts = [verdict for folder in folders for verdict in verdicts_on(folder)]
    print(page(verdicts).rstrip() if "--page" in arguments else table(verdicts))  # noqa: T201
    return int(not verdicts or any(one.status is Status.FAILED for one in verdicts))
