"""Recording: rollouts saved with everything that made their signal, and recomputed from the file alone."""

from lightning_rl.recording.recorder import RolloutRecorder
from lightning_rl.recording.recording import Recording
from lightning_rl.recording.replay import Replayed, replay

__all__ = ["Recording", "Replayed", "RolloutRecorder", "replay"]
