"""What a correction may contribute, what it gets to see, and how contributions combine."""

from lightning_rl.corrections.base import LossTerm, RLCallback
from lightning_rl.corrections.combine import Contributions
from lightning_rl.corrections.stat import Stat
from lightning_rl.corrections.view import LossView

__all__ = ["Contributions", "LossTerm", "LossView", "RLCallback", "Stat"]
