"""Recordings: saved rollouts with all inputs of their signal, which can be recomputed from the file."""

from lightning_rl.recording.recompute import Replayed, replay
from lightning_rl.recording.recorder import RolloutRecorder
from lightning_rl.recording.recording import Recording

__all__ = ["Recording", "Replayed", "RolloutRecorder", "replay"]
