"""The program of a process that makes the questions of a task of reasoning-gym, and ends.

Some tasks iterate over sets, whose order differs between processes, so the caller sets ``PYTHONHASHSEED``. The program
imports nothing of lightning-rl. Tasks change global generators of this process only.

In, pickled: ``(task, options, size)``. Out, pickled: ``("entries", entries)`` or ``("error", class and text)``.
"""

import importlib
import os
import pickle
import sys


def main() -> None:
    """Makes them."""
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints is no reply
    task, options, size = pickle.load(sys.stdin.buffer)
    try:
        questions = importlib.import_module("reasoning_gym").create_dataset(task, size=size, **options)
        pickle.dump(("entries", [questions[number] for number in range(size)]), reply)
    except Exception as error:  # noqa: BLE001  the caller raises it
        pickle.dump(("error", f"{type(error).__name__}: {error}"), reply)
    reply.close()


if __name__ == "__main__":
    main()
