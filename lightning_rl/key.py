"""Key: what a server is shown, from the environment or from a file; anybody may read a command line."""

import os
import re
import secrets
import tempfile
from pathlib import Path

KEY = "VLLM_API_KEY"
OPEN_TO_OTHERS = 0o027  # bits of a file's mode: others may do nothing with it, the group may read


def default_key_file() -> Path:
    """Where trainer and servers of one user on one machine look for a key that nobody has named."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "lightning-rl" / "api-key"


def check_key(key: str, where: str) -> None:
    """Refuses what cannot be sent in a header.

    Raises:
        ValueError: naming where the key came from, and never the key.
    """
    if not re.fullmatch(r"[!-~]+", key):
        raise ValueError(f"expected {where} to hold a key of printable ASCII without spaces, got something else")


def read_key(path: Path) -> str:
    """The key in a file.

    Raises:
        ValueError: if there is none, or others than the owner may read the file, naming the cure.
    """
    try:
        mode, key = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a file with a key at {path}, got {error}") from error
    if mode & OPEN_TO_OTHERS:
        raise ValueError(f"expected {path} to be its owner's alone, got mode {mode & 0o777:o}: chmod 600 {path}")
    check_key(key, str(path))
    return key


def ensure_key_file(path: Path) -> str:
    """The key in a file, which is made with a new one if there is none: only its owner may read it."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent)  # mode 600
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            Path(path).hardlink_to(part)  # whole, and only if nobody else was first
        except FileExistsError:
            pass
        finally:
            Path(part).unlink()
    return read_key(path)


def find_key(given: str | Path | None) -> str | None:
    """What a client sends: a key, that of a file, of ``VLLM_API_KEY``, or of the default file if it exists; "" is none.

    Raises:
        ValueError: if a file or the key is not what it should be.
    """
    if isinstance(given, Path):
        return read_key(given)
    if not isinstance(given, str | None):
        raise ValueError(
            f"expected api_key to be a text, the Path of a file that holds it, or None, got {type(given).__name__}"
        )
    key = os.environ.get(KEY) if given is None else given
    if key:
        check_key(key, KEY if given is None else "api_key")
        return key
    return read_key(default_key_file()) if given is None and default_key_file().exists() else None
