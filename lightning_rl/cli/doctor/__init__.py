"""doctor: looks at a recipe before it trains, and says what would go wrong and how to fix it."""

from lightning_rl.cli.doctor.command import doctor, run

__all__ = ["doctor", "run"]
