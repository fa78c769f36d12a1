"""Reward models: sequence classifiers.

Hugging Face's decoders with a classification head read the score at the last token other than ``config.pad_token_id``.
Without a pad id they refuse batches; if texts end with the pad id, they read one token too early. So each batch is
padded with an id that none of its texts ends with, and ``config.pad_token_id`` is set to it.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_rl.rewards.text import ids_of, text_of
from lightning_rl.utils.arguments import check_choices, check_counts, check_rows
from lightning_rl.utils.chat_rendering import apply_template

SCORING = threading.Lock()  # build a model once; one batch at a time sets the pad id


@dataclass(frozen=True, kw_only=True)
class RewardModel:
    """Score of a model for each prompt with its completion.

    The model is built at the first call in each process; it is in evaluation mode and never trained. A text longer than
    the model's maximum gets NaN and is left out of training, with a warning.

    Args:
        model: Name or path of a sequence classifier, or a callable without arguments that builds one.
        tokenizer: Tokenizer of the model or its name; by default that of a model given by name.
        tokens: ``"own"``: text, tokenized by the model's tokenizer, with its chat template for chat messages;
            ``"policy"``: the sampled ids, for a model with the policy's tokenizer.
        label: Index of the label if there are several.
        device: Device of the model; by default the accelerator of this process, else the CPU.
        dtype: Dtype of the weights; by default as saved or built.
        max_tokens_per_microbatch: Maximum number of tokens of a batch, padding included; 1 for one text at a time.
        max_length: Maximum number of tokens of a text; by default that of the model's configuration.

    Raises:
        ValueError: If an option is invalid; at the first call if the model cannot score this way.
    """

    model: str | Path | Callable[[], nn.Module]
    tokenizer: Any = None
    tokens: Literal["own", "policy"] = "own"
    label: int | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    max_tokens_per_microbatch: int = 16384
    max_length: int | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        check_choices(("own", "policy"), tokens=self.tokens)
        check_counts(1, max_tokens_per_microbatch=self.max_tokens_per_microbatch)
        check_counts(1, optional=True, max_length=self.max_length)
        if not callable(self.model) and not isinstance(self.model, str | Path):
            raise ValueError(
                f"expected model to be a name, a path or a callable that builds one, got {self.model!r:.99}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the options only: a copy builds its own model."""
        return {key: value for key, value in vars(self).items() if key not in ("scorer", "reader")}

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        completion_ids: Sequence[Sequence[int]] = (),
        **columns: Any,
    ) -> list[float | None]:
        """Return one value per completion."""
        rows = self._rows(prompts, completions, completion_ids)
        values: list[float | None] = [math.nan if row else None for row in rows]
        with SCORING:
            scorer = self.scorer
            limit = scorer.max_length if self.max_length is None else self.max_length
            fitting = [number for number, row in enumerate(rows) if row and (limit is None or len(row) <= limit)]
            for number, value in zip(fitting, scorer.scores([rows[number] for number in fitting]), strict=True):
                values[number] = value
        overlong = [len(row) for row in rows if limit is not None and len(row) > limit]
        if overlong:
            warnings.warn(
                f"{len(overlong)} texts are longer than the reward model's limit of {limit} tokens, the longest "
                f"has {max(overlong)}: their rows get no reward; pass max_length= or shorten the completions",
                stacklevel=2,
            )
        return values

    def _rows(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the token ids of each prompt with its completion."""
        check_rows(len(completions), completions=completions, prompts=prompts)
        if self.tokens == "own":
            return [self._text_ids(prompt, text_of(text)) for prompt, text in zip(prompts, completions, strict=True)]
        ids = ids_of(completions, completion_ids, reward=self)
        return [[*self._prompt_ids(prompt), *row] for prompt, row in zip(prompts, ids, strict=True)]

    @cached_property
    def scorer(self) -> "LoadedRewardModel":
        """Model, built and checked."""
        with torch.random.fork_rng(devices=[]):  # keep the random state of the run
            module = self._build()
        device = self.device
        if device is None:
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
        module = module.to(device=device, dtype=self.dtype).requires_grad_(requires_grad=False).eval()
        scorer = LoadedRewardModel(module, self.label, self.max_tokens_per_microbatch)
        if self.max_tokens_per_microbatch > 1:
            scorer.check_padding()
        return scorer

    @cached_property
    def reader(self) -> Any:
        """Tokenizer."""
        from transformers import AutoTokenizer

        source = self.tokenizer
        if source is None and isinstance(self.model, str | Path):
            source = self.model
        if source is None:
            raise ValueError("expected tokenizer= for a reward model that a callable builds, got None")
        if not isinstance(source, str | Path):
            return source
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)

    def _build(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        if callable(self.model):
            return self.model()
        dtype: Any = "auto" if self.dtype is None else self.dtype
        load: Any = AutoModelForSequenceClassification.from_pretrained
        model, info = load(self.model, dtype=dtype, trust_remote_code=False, output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(
                f"expected {self.model} to be a reward model, but it has no weights for "
                f"{sorted(info['missing_keys'])}: they would be random; name a sequence "
                "classifier, or pass a callable that builds one"
            )
        return model

    def _text_ids(self, prompt: Any, text: str) -> list[int]:
        if isinstance(prompt, str):
            return self.reader(prompt + text)["input_ids"]
        if _is_chat(prompt):
            return self._template([*prompt, {"role": "assistant", "content": text}], add_generation_prompt=False)
        raise ValueError(
            "expected prompts as text or as chat messages for a reward model with its own tokenizer, got token "
            'ids: pass tokens="policy" if it has that of the policy'
        )

    def _prompt_ids(self, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.reader(prompt)["input_ids"]
        return self._template(prompt, add_generation_prompt=True) if _is_chat(prompt) else prompt

    def _template(self, messages: Sequence[Any], *, add_generation_prompt: bool) -> list[int]:
        if self.reader.chat_template is None:
            raise ValueError(
                f"expected the tokenizer of the reward model {self.model} to have a chat template for prompts of chat "
                "messages, got none: set one and pass the tokenizer with tokenizer="
            )
        text = apply_template(self.reader, messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        return self.reader(text, add_special_tokens=False)["input_ids"]  # the template adds them


@dataclass(frozen=True)
class LoadedRewardModel:
    """Built model and the way to read its score.

    Args:
        module: Model on its device, in evaluation mode.
        label: Index of the label if there are several.
        max_tokens_per_microbatch: Maximum number of tokens of a batch.
    """

    module: nn.Module
    label: int | None
    max_tokens_per_microbatch: int

    @property
    def config(self) -> Any:
        """Configuration of the model, or None."""
        config: Any = getattr(self.module, "config", None)
        return None if config is None else config.get_text_config()

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a text, or None if unknown."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary, or None if unknown."""
        return getattr(self.config, "vocab_size", None)

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of token ids; no row is empty.

        Raises:
            ValueError: If an id is outside of the vocabulary, or the model's output is not a score.
        """
        largest = max((max(row) for row in rows), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise ValueError(
                f"expected token ids below the reward model's vocabulary of {self.vocabulary}, got {largest}: it uses "
                'another tokenizer than the policy: pass tokens="own"'
            )
        values = [math.nan] * len(rows)
        for batch in self._batches(rows):
            for number, value in zip(batch, self._batch_scores([rows[number] for number in batch]), strict=True):
                values[number] = value
        return values

    def check_padding(self) -> None:
        """Check that a short text gets the same score alone and beside a longer one.

        Raises:
            ValueError: If the scores differ beyond rounding.
        """
        known = self.vocabulary or 8
        rows = [[(7 * place + 3) % known for place in range(length)] for length in (3, 8)]
        together, alone = self._batch_scores(rows), [self._batch_scores([row])[0] for row in rows]
        dtype = next((parameter.dtype for parameter in self.module.parameters()), torch.float32)
        room = math.sqrt(torch.finfo(dtype).eps) * (1 + max(map(abs, alone)))
        if any(abs(one - other) > room for one, other in zip(together, alone, strict=True)):
            raise ValueError(
                f"expected the reward model to score a text the same beside a longer one as alone, got {together} and "
                f"{alone}: pass max_tokens_per_microbatch=1 to score one text at a time, without padding"
            )

    def _batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield batches of row indices of similar length within the budget; a longer row alone."""
        batch: list[int] = []
        for number in sorted(range(len(rows)), key=lambda number: -len(rows[number])):
            longest = len(rows[batch[0]]) if batch else 0
            crowded = self.vocabulary is not None and len(batch) + 1 >= self.vocabulary
            if batch and ((len(batch) + 1) * longest > self.max_tokens_per_microbatch or crowded):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @torch.inference_mode()
    def _batch_scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        lengths = torch.tensor([len(row) for row in rows])
        ends = {row[-1] for row in rows}
        padding = next(number for number in range(len(rows) + 1) if number not in ends)
        if self.config is not None:
            self.config.pad_token_id = padding
        width = int(lengths.max())
        ids = torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()
        with torch.autocast(device.type, enabled=False):
            output = self.module(input_ids=ids.to(device), attention_mask=mask.to(device))
        logits = output if isinstance(output, Tensor) else output["logits"]
        return self._read(logits.float().cpu(), len(rows))

    def _read(self, logits: Tensor, rows: int) -> list[float]:
        """Return the scores of the label, from logits [B] or [B, labels]."""
        logits = logits[:, None] if logits.dim() == 1 else logits
        if logits.dim() != 2 or len(logits) != rows:
            raise ValueError(
                f"expected the reward model to return [{rows}, labels], got {list(logits.shape)}: build a sequence "
                "classifier"
            )
        label = self.label if self.label is not None else 0 if logits.shape[1] == 1 else None
        if label is None or not -logits.shape[1] <= label < logits.shape[1]:
            raise ValueError(f"expected label= to index the reward model's {logits.shape[1]} labels, got {self.label}")
        return logits[:, label].tolist()


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and any(not isinstance(part, int) for part in prompt)
