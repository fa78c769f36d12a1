"""Terminal: text of models and files for a person, its control characters shown and never acted on."""

import unicodedata


def visible(text: str) -> str:
    r"""A text whose control characters, but line ends, are written out as Python writes them.

    A model can write whatever it likes, and so can a file from elsewhere: sequences that move the cursor, rename the
    window, reverse the direction of reading or hide what follows. Unicode's category C holds all of these.

    Example:
        >>> visible("done\x1b[2K\nnext")
        'done\\x1b[2K\nnext'
    """
    return "".join(map(_visible, text))


def _visible(mark: str) -> str:
    return repr(mark)[1:-1] if mark != "\n" and unicodedata.category(mark).startswith("C") else mark
