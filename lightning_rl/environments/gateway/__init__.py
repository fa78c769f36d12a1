"""HTTP protocols of model APIs, in which programs call the policy."""

from lightning_rl.environments.gateway.anthropic_messages import AnthropicMessages
from lightning_rl.environments.gateway.calls import Call, CallAnswer, WireProtocol
from lightning_rl.environments.gateway.chat_completions import ChatCompletions
from lightning_rl.environments.gateway.responses import Responses

__all__ = ["AnthropicMessages", "Call", "CallAnswer", "ChatCompletions", "Responses", "WireProtocol"]
