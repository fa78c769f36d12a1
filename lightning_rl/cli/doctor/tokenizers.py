"""Check that the loaded tokenizer splits texts as its ``tokenizer.json`` does."""

from collections.abc import Iterator

from tokenizers import Tokenizer
from transformers.utils.hub import cached_file

from lightning_rl.cli.doctor.findings import warning
from lightning_rl.module import RLLightningModule
from lightning_rl.utils.finding import Finding

PROBES = ("12345 + 6.78 = ?", "Don't  stop,\nplease.\n\n", "naïve 数学 😀", "  return x[0]\t# done")


def tokenizer(module: RLLightningModule) -> Iterator[Finding]:
    """Check that the loaded tokenizer returns the same ids as ``tokenizer.json``.

    transformers 5 chooses the tokenizer class by the model type in ``config.json``, and a class has its own
    pre-tokenizer: a tokenizer in a Qwen2 folder is loaded with that of Qwen2.
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
            observed = f"{type(loaded).__name__} encodes {text!r} as {ids}, tokenizer.json as {expected}"
            fix = (
                "tokenizer=PreTrainedTokenizerFast.from_pretrained(folder), unless the model was trained on the former"
            )
            yield warning("tokenizer", observed, fix)
            return


def tokenizer_file(name: str) -> str | None:
    """Return the local path of the ``tokenizer.json`` of a folder or model, or None."""
    try:
        return cached_file(name, "tokenizer.json", local_files_only=True)
    except OSError:
        return None
