"""doctor: checks a recipe before training and reports problems with their fixes."""

from lightning_rl.cli.doctor.command import doctor, run

__all__ = ["doctor", "run"]
