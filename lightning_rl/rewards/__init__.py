"""Reward functions: each rank calls them on its completions after generation."""

from lightning_rl.rewards.answer_match import AnswerMatch, UnreadableReference
from lightning_rl.rewards.choice_match import ChoiceMatch
from lightning_rl.rewards.code import CodeTests
from lightning_rl.rewards.exact_match import ExactMatch
from lightning_rl.rewards.json_schema import JSONSchema
from lightning_rl.rewards.judge import Judge
from lightning_rl.rewards.language import Language
from lightning_rl.rewards.length import Length
from lightning_rl.rewards.math_match import MathMatch
from lightning_rl.rewards.number_match import NumberMatch
from lightning_rl.rewards.regex_match import RegexMatch
from lightning_rl.rewards.repetition import Repetition
from lightning_rl.rewards.reward_call import Reward
from lightning_rl.rewards.reward_model import RewardModel
from lightning_rl.rewards.sandbox import Sandbox, SandboxResult, SandboxUnavailable
from lightning_rl.rewards.sandbox_service import SandboxService
from lightning_rl.rewards.scoring import RewardError, Rewards, RewardSource
from lightning_rl.rewards.subprocess_reward import SubprocessReward
from lightning_rl.rewards.tag_format import TagFormat
from lightning_rl.rewards.text import text_of
from lightning_rl.rewards.token_f1 import TokenF1
from lightning_rl.rewards.verl_reward import VerlReward
from lightning_rl.samples import Failure, RewardCall

__all__ = [
    "AnswerMatch",
    "ChoiceMatch",
    "CodeTests",
    "ExactMatch",
    "Failure",
    "JSONSchema",
    "Judge",
    "Language",
    "Length",
    "MathMatch",
    "NumberMatch",
    "RegexMatch",
    "Repetition",
    "Reward",
    "RewardCall",
    "RewardError",
    "RewardModel",
    "RewardSource",
    "Rewards",
    "Sandbox",
    "SandboxResult",
    "SandboxService",
    "SandboxUnavailable",
    "SubprocessReward",
    "TagFormat",
    "TokenF1",
    "UnreadableReference",
    "VerlReward",
    "text_of",
]
