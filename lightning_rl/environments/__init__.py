"""Environments: conversations of several turns of a policy with users, tools or simulators."""

from lightning_rl.environments.chat_template import Bridge, BridgeError
from lightning_rl.environments.conversation import Conversation, ConversationLimits
from lightning_rl.environments.conversation_options import Conversations
from lightning_rl.environments.driver import converse
from lightning_rl.environments.environment import Action, Environment, StepResult, TokenEnvironment, TokenStep, ToolCall
from lightning_rl.environments.json_calls import JsonParser
from lightning_rl.environments.messages import MessageEnvironment
from lightning_rl.environments.outcome import EnvironmentReward
from lightning_rl.environments.parsing import (
    AnswerParser,
    ParserError,
    RendererParser,
    TemplateParser,
    parser_for,
)
from lightning_rl.environments.program import PolicyEndpoint, Program, ProgramResult
from lightning_rl.environments.tools import JsonTool, ObjectEnvironment, ToolEnvironment
from lightning_rl.samples import Message

__all__ = [
    "Action",
    "AnswerParser",
    "Bridge",
    "BridgeError",
    "Conversation",
    "ConversationLimits",
    "Conversations",
    "Environment",
    "EnvironmentReward",
    "JsonParser",
    "JsonTool",
    "Message",
    "MessageEnvironment",
    "ObjectEnvironment",
    "ParserError",
    "PolicyEndpoint",
    "Program",
    "ProgramResult",
    "RendererParser",
    "StepResult",
    "TemplateParser",
    "TokenEnvironment",
    "TokenStep",
    "ToolCall",
    "ToolEnvironment",
    "converse",
    "parser_for",
]
