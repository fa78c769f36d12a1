"""``python -m lightning_rl``, for launchers that take a module."""

from lightning_rl.cli.main import main

if __name__ == "__main__":
    main()
