"""Tokenizer: are texts cut as ``tokenizer.json`` says, whatever class transformers loads it with?"""

from collections.abc import Iterator

from tokenizers import Tokenizer
from transformers.utils.hub import cached_file

from lightning_rl.cli.doctor.findings import warning
from lightning_rl.finding import Finding
from lightning_rl.module import RLLightningModule

PROBES = ("12345 + 6.78 = ?", "Don't  stop,\nplease.\n\n", "naïve 数学 😀", "  return x[0]\t# done")


def tokenizer(module: RLLightningModule) -> Iterator[Finding]:
    """The loaded tokenizer gives the ids that ``tokenizer.json`` gives, which lies beside its model.

    transformers 5 takes the class of a tokenizer from the type of the model in ``config.json``, and a class brings
    rules of its own for cutting a text into words: any tokenizer in the folder of a Qwen2 is read with those of Qwen2.
    """
    loaded = module.tokenizer
    file = None if loaded is None else tokenizer_file(loaded.name_or_path)
    if loaded is None or file is None:
        return
    written = Tokenizer.from_file(file)
    for text in PROBES:
        ids = loaded.encode(text, add_special_tokens=False)
        expected = written.encode(text, add_special_tokens=False).ids
        if ids != expected:
            observed = f"{type(loaded).__name__} reads {text!r} as {ids}, tokenizer.json as {expected}"
            fix = (
                "tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), unless the model learnt from the former ids"
            )
            yield warning("tokenizer", observed, fix)
            return


def tokenizer_file(name: str) -> str | None:
    """Where the ``tokenizer.json`` of a folder or of a model lies on this machine; ``None`` if it does not."""
    try:
        return cached_file(name, "tokenizer.json", local_files_only=True)
    except OSError:
        return None
