"""Keys, passwords and other secrets, which no file, logger or message of a run may contain."""

import re
from typing import Any

STRONG = re.compile(
    r"(?:^|_)(?:(?:api|access|secret|private|auth)_?key|pass(?:word|wd|phrase)s?|pw|pwd|secrets?"
    r"|credentials?|cookies?|authorization|bearer|jwt|dsn|webhook|connection_string)$"
    r"|^token$|(?:^|_)(?:hf|huggingface|hub|github|gitlab|wandb|auth|access|api|bearer|refresh|session|user)_?token$"
)
WEAK = re.compile(r"(?:^|_)(?:key|auth)$")
COLUMN = re.compile(r"[A-Za-z_.]*")  # value of a weak name that names a column or an entry
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
QUERY = re.compile(r"(?<=[?&])([\w-]+)=([^&#\s]+)")
HEADER = re.compile(r"\s*(?:bearer|basic)\s+\S+\s*", re.IGNORECASE)
KNOWN = re.compile(r"\b(?:sk|hf|ghp|gho)[-_][\w-]{16,}|\bAKIA[0-9A-Z]{16}\b")  # of OpenAI, Hugging Face, GitHub, AWS
HIDDEN = "***"


def is_secret(name: str, value: Any) -> bool:
    """Return True if an option, attribute, variable, header or entry of this name and value holds a secret.

    Numbers, flags and None are no secrets, and ``key`` may name a column.

    Example:
        >>> [is_secret(name, "9f3a") for name in ("apiKey", "X-Api-Key", "hf_token", "key", "eos_token", "tokens")]
        [True, True, True, True, False, False]
        >>> is_secret("key", "answer"), is_secret("token", 151645)
        (False, False)
    """
    if value is None or isinstance(value, bool | int | float):
        return False
    words = HUMP.sub("_", name).replace("-", "_").lower()
    if STRONG.search(words):
        return True
    return WEAK.search(words) is not None and not (isinstance(value, str) and COLUMN.fullmatch(value))


def hide_secrets(text: str) -> str:
    """Return a text with ``***`` for users and passwords of URLs, values of headers, and keys of known services.

    Example:
        >>> hide_secrets("http://me:sesame@10.0.0.1/v1?model=a&api_key=sesame"), hide_secrets("Bearer sesame")
        ('http://***@10.0.0.1/v1?model=a&api_key=***', '***')
    """
    if HEADER.fullmatch(text):
        return HIDDEN
    text = QUERY.sub(lambda match: f"{match[1]}={HIDDEN}" if is_secret(match[1], match[2]) else match[0], text)
    return KNOWN.sub(HIDDEN, URL.sub(HIDDEN, text))
