"""Prompts from any source, encoded for the policy in the order of a run, and a step index for each optimizer step."""

from lightning_rl.data.data_module import PromptDataModule, data_module_of, find_data_module
from lightning_rl.data.dataset import PromptDataset
from lightning_rl.data.encoding import Encoder
from lightning_rl.data.prompt_stream import PromptStream
from lightning_rl.data.row_schema import PromptForm
from lightning_rl.data.sources import PromptSource
from lightning_rl.data.step_loader import Position, StepIndex, StepLoader
from lightning_rl.samples import Prompt

__all__ = [
    "Encoder",
    "Position",
    "Prompt",
    "PromptDataModule",
    "PromptDataset",
    "PromptForm",
    "PromptSource",
    "PromptStream",
    "StepIndex",
    "StepLoader",
    "data_module_of",
    "find_data_module",
]
