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
HEADER = re.compile(r"\s*(?:bearer|basic)\s+\S+\s*", re.IGNORECASE)
CREDENTIALS = re.compile(r"\b((?i:bearer|basic)\s+)(?=\S+[\dA-Z=])[\w.~+/=-]{8,}")  # in a longer text
NAME = re.compile(r"""(?<![\w-])([\w-]++)(?:\\?["']?[ \t]*(?:=(?!=)|:)[ \t]*|(\\?["'],[ \t]*(?=["'])|[ \t]++))""")
VALUE = re.compile(
    r"""(\\?["'])([^\n]*?)\1|(?![<({[\-])((?:(?:bearer|basic)[ ]+)?[^\s&"']*[^\s&"',;:.)\]}\\])""", re.IGNORECASE
)
NO_SECRET = re.compile(r"\d{0,6}|none|null|true|false|\*+", re.IGNORECASE)
WORD = re.compile(rf"{COLUMN.pattern}|{NO_SECRET.pattern}", re.IGNORECASE)  # after an option in a sentence
KNOWN = re.compile(  # of OpenAI, Hugging Face, GitHub, GitLab, AWS, Google and Slack
    r"\b(?:(?:sk|hf|ghp|gho|github_pat|glpat)[-_][\w-]{16,}|AKIA[0-9A-Z]{16}\b|AIza[\w-]{35}|xox[a-z]-[\w-]{10,})"
)
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
    words = HUMP.sub("_", name).replace("-", "_").strip("_").lower()
    if STRONG.search(words):
        return True
    return WEAK.search(words) is not None and not (isinstance(value, str) and COLUMN.fullmatch(value))


def hide_secrets(text: str) -> str:
    """Return a text with ``***`` for credentials of URLs and headers, keys of known services, and secrets after names.

    Example:
        >>> hide_secrets("http://me:sesame@10.0.0.1/v1?model=a&api_key=sesame"), hide_secrets("Bearer sesame")
        ('http://***@10.0.0.1/v1?model=a&api_key=***', '***')
        >>> hide_secrets("HF_TOKEN=sesame run --max-tokens=5 --password 's3same'")
        "HF_TOKEN=*** run --max-tokens=5 --password '***'"
    """
    if HEADER.fullmatch(text):
        return HIDDEN
    text = CREDENTIALS.sub(rf"\1{HIDDEN}", _hide_values(URL.sub(HIDDEN, text)))
    return KNOWN.sub(HIDDEN, text)


def _hide_values(text: str) -> str:
    """Hide the secrets among values that follow names as name=value, name: value, --name value or '--name', 'value'."""
    parts, start, found = list[str](), 0, NAME.search(text)
    while found:
        name, end = found[1], found.end(1)
        possible = (not found[2] or name.startswith("-")) and is_secret(name, HIDDEN)
        value = VALUE.match(text, found.end()) if possible else None
        if value and _holds_secret(name, value, NO_SECRET if value[1] or not found[2] else WORD):
            parts += [text[start : found.end()], value[1] or "", HIDDEN, value[1] or ""]
            start = end = value.end()
        found = NAME.search(text, end)
    return "".join([*parts, text[start:]])


def _holds_secret(name: str, value: re.Match[str], plain: re.Pattern[str]) -> bool:
    text = value[2] or value[3] or ""
    return plain.fullmatch(text) is None and is_secret(name, text)
