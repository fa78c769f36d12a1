"""Prompts from any source, encoded for the policy in the order of a run, and a ticket for each optimizer step."""

from lightning_rl.data.dataset import PromptDataset
from lightning_rl.data.encoding import Encoder
from lightning_rl.data.form import PromptForm
from lightning_rl.data.module import PromptDataModule, prompt_stream_of
from lightning_rl.data.prompts import Prompt
from lightning_rl.data.sources import PromptSource
from lightning_rl.data.stream import PromptStream
from lightning_rl.data.tickets import Ticket, TicketLoader

__all__ = [
    "Encoder",
    "Prompt",
    "PromptDataModule",
    "PromptDataset",
    "PromptForm",
    "PromptSource",
    "PromptStream",
    "Ticket",
    "TicketLoader",
    "prompt_stream_of",
]
