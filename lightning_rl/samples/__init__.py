"""Records of a sample on its way from a row of the data to a row of a rollout."""

from lightning_rl.samples.completion import POLICY, Completion, FinishReason, Request
from lightning_rl.samples.failure import Failure
from lightning_rl.samples.media import Media
from lightning_rl.samples.prompt import Message, Prompt
from lightning_rl.samples.reward_call import RewardCall, Rows
from lightning_rl.samples.sampling_params import SamplingParams
from lightning_rl.samples.trajectory import PROMPT, Segment, Trajectory

__all__ = [
    "POLICY",
    "PROMPT",
    "Completion",
    "Failure",
    "FinishReason",
    "Media",
    "Message",
    "Prompt",
    "Request",
    "RewardCall",
    "Rows",
    "SamplingParams",
    "Segment",
    "Trajectory",
]
