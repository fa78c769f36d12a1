"""What a correction may contribute, what it gets to see, and how contributions combine."""

from lightning_rl.hooks.callback import LossTerm, RLCallback
from lightning_rl.hooks.combine import Contributions
from lightning_rl.hooks.stat import Stat
from lightning_rl.hooks.view import LossView

__all__ = ["Contributions", "LossTerm", "LossView", "RLCallback", "Stat"]
