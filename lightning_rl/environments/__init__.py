"""Environments: conversations of several turns of a policy with users, tools or simulators."""

from lightning_rl.environments.bridge import Bridge, BridgeError
from lightning_rl.environments.conversation import Conversation, ConversationRow, Limits, Transcript, Turn
from lightning_rl.environments.environment import (
    Answer,
    Environment,
    Message,
    Step,
    TokenEnvironment,
    TokenStep,
    ToolCall,
)
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.outcome import Outcome
from lightning_rl.environments.parsing import (
    AnswerParser,
    ParserError,
    RendererParser,
    TemplateParser,
    parser_for,
)
from lightning_rl.environments.play import Opening, converse, play
from lightning_rl.environments.reward import EnvironmentReward
from lightning_rl.environments.tools import ObjectEnvironment, ToolEnvironment

__all__ = [
    "Answer",
    "AnswerParser",
    "Bridge",
    "BridgeError",
    "Conversation",
    "ConversationRow",
    "Environment",
    "EnvironmentReward",
    "Limits",
    "Message",
    "MessageEnvironment",
    "ObjectEnvironment",
    "Opening",
    "Outcome",
    "ParserError",
    "RendererParser",
    "Step",
    "TemplateParser",
    "TokenEnvironment",
    "TokenStep",
    "ToolCall",
    "ToolEnvironment",
    "Transcript",
    "Turn",
    "converse",
    "parser_for",
    "play",
]
