"""Reader of the letters that a text chooses: after words that lead to a choice, before words that confirm it, alone."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_rl.rewards.text import SPAN, markers_pattern

LATEX = r"\\(?:text|math|mbox|rm|bf|displaystyle|[,;!:\ ])\w*"
LATIN = "A-Za-z\u00c0-\u024f0-9"


def _words(words: str) -> str:
    """Return a pattern for whole words, which ``|`` separates."""
    return rf"(?<![^\W_])(?:{words})(?![^\W_])"


def _star(name: str, pattern: str) -> str:
    """Return a pattern, with a name, repeated as often as possible: what follows gets nothing of it back."""
    return rf"(?=(?P<{name}>(?:{pattern})*))(?P={name})"


OPTION = (
    r"(?:answer|option|choice|letter|alternative|statement|antwort|buchstabe|r[e\u00e9]ponse|lettre|choix|respuesta|letra|"
    r"opci[o\u00f3]n|resposta|op[c\u00e7][a\u00e3]o|alternativa|gabarito|risposta|opzione|lettera|"
    r"\u043e\u0442\u0432\u0435\u0442|\u0432\u0430\u0440\u0438\u0430\u043d\u0442|\u9009\u9879|\u9078\u9805|"
    r"\u9078\u629e\u80a2|\uc120\ud0dd\uc9c0)"
)
IS = r"(?:is|was|be|are|ist|w\u00e4re|lautet|es|est|serait|\u00e8|\u00e9|sar\u00e0)"  # codespell:ignore ist
JOINS = r"and|or|as\ well\ as|to|through|und|oder|bis|y|o|u|e|ou|et|\u0438|\u0438\u043b\u0438"  # codespell:ignore oder
AND = (
    rf"(?:[/&|+\u2013\u2014-]|{_words(JOINS)}|\u6216\u8005|\u6216|\u548c|\u4e0e|\u53ca|\u3068|\u304b|\ub610\ub294|"
    r"\uacfc|\uc640|\\(?:text|mbox|quad)\w*)"
)
ADVERBS = r"[^\W\d_]+(?:ly|mente?|lich)|most|best|just|maybe|perhaps|indeed|thus|therefore|hence|then|so|still|also|"
ADVERBS += r"only|nur|wohl"
OPINION = r"i(?=\s+(?:think|believe|guess|would))|think|believe|would|say|guess|in|my|opinion|fact|to|be"
ARTICLES = rf"the|la|el|las|der|die|l(?=['\u2019])|(?-i:[ao])(?=\s+(?:{OPTION}|\w(?!\w)))"
OTHERS = r"either|both|all|any|of|correct|right|number"
WORDS = (
    rf"(?:{_words('|'.join((ADVERBS, OPINION, ARTICLES, OTHERS)))}|{OPTION}s?|\u662f|\u5e94\u8be5|\u5c31|\u4e3a|\u7b2c|"
    r"\u62e9|\u64c7|\u9879)"
)
RATHER = rf"(?:{_words('but|rather|instead|sondern|mais|sino|mas')}|\u800c)"
SUBJECTS = rf"{OPTION}|it|that|one|solution|l\u00f6sung|soluci\u00f3n|selection|correct|right|richtig|korrekt"
VERBS = (
    r"choose|choosing|chose|pick\w*|select\w*|go(?:ing)?\ with|opt(?:ing)?\ for|take|settle\ on|match(?:es)?|"
    r"corresponds?\ to|leaves|w\u00e4hle|nehme|elijo|escolho|choisis|scelgo|"
    r"\u043f\u0440\u0430\u0432\u0438\u043b\u044c\u043d\u044b\u0439\ \u043e\u0442\u0432\u0435\u0442"
)
LEADS = (
    rf"{_words(SUBJECTS)}(?:[ \t]+(?!not\b)[^\W\d_]+){{0,5}}?[\s\"'*_`)\]]*"
    rf"(?:[:=>\u2013\u2014\u2192-]+|{_words(IS)}|['\u2019]s\b)",
    _words(VERBS),
    r"(?:\u9009|\u9078)(?:\u62e9|\u64c7|\u9879|\u9805|\u7b54\u6848|\u4e86|\u662f|\u4e3a|:)*|\u800c\u662f|\u3067\u306f\u306a\u304f",
    r"(?:\u7b54\u6848|\u7b54\u3048?|\u6b63\u89e3|\u89e3\u7b54|\u6b63\u786e\u9009\u9879|\uc815\ub2f5|\ub2f5)"
    r"[^\n.\u3002A-Za-z]{0,4}?(?:\u662f|\u4e3a|\u70ba|:|\u306f|\uc740|\ub294|\u9009)",
)
ASIAN = r"\s*(?:\u9009?\u9879)?\s*"  # "option" after its letter in Chinese
RIGHT = (
    r"(?<=right)|(?<=correct)|(?<=best)|(?<=only\ )(?:option|choice|one)|answer|appropriate|solution|richtig\w*|"
    r"korrekt|corr?e[ct]{1,2}\w+|bonne|giust\w+|\u0432\u0435\u0440\w+|\u043f\u0440\u0430\u0432\u0438\u043b\w+"
)
CONFIRMED = re.compile(
    r"[\s)\]}*_\"'.$]*(?:(?:(?:must|would|should|seems|looks|has|to)\s+)*"
    rf"(?:be|{IS}|seems|looks)\s+(?:{WORDS}|\s){{0,12}}(?:{RIGHT})(?![^\W_])"
    rf"|{ASIAN}(?:\u662f|\u4e3a|\u304c|\u306f|\uac00|\uc774)?\s*"
    r"(?:\u6b63\u786e|\u6b63\u89e3|\u5bf9\u7684|\u6b63\u3057\u3044|\u7b54\u6848|\u7b54\u3048|\uc815\ub2f5))",
    re.IGNORECASE,
)
NOT = r"not(?!\s+only)|never|neither|nor|than|instead\ of|unlike|except|nicht|pas|non|n\u00e3o"
NOT += r"|eliminat\w+|exclud\w+|rul\w+\ out"
UNLIKE = re.compile(
    rf"(?:{_words(NOT)}|n['\u2019]t\b|\bcannot\b|(?<=\sno)|(?<=^no)|\u4e0d(?:\u662f|\u9009|\u80fd|\u4f1a)*|\u6392\u9664)"
    rf"(?:\s+(?:{IS}|it|that|think|believe|choose|pick|select)\b)*",
    re.IGNORECASE,
)
WRONG = r"not|never|wrong|incorrect\w*|false|impossible|out|eliminated|excluded|too|"
WRONG += r"falsch|nicht|faux|fausse|errado|errada|falsa"
IS_WRONG = rf"(?:{IS}|sind|seems?|looks?)\s+(?:[^\W\d_]+\s+)?(?:{WRONG})"
DOES_NOT = r"(?:is|are|ca|does|wo)n['\u2019]t|cannot|no\s+es|n['\u2019]est|n\u00e3o|non"
RULED_OUT = re.compile(
    rf"[\s)\]}}*_\"'.$]*(?:{_words(IS_WRONG)}|{_words(DOES_NOT)}|{ASIAN}"
    r"(?:(?=\u3067\u306f\u306a)|\u4e0d\u5bf9|\u9519|\u4e0d\u6b63\u786e|\u4e0d\u662f|\u662f\u9519))",
    re.IGNORECASE,
)
SINGULAR = re.compile(_words(r"is|isn|ist|es|est|seems|looks"), re.IGNORECASE)  # codespell:ignore ist
AGAINST = r"but|wait|no|however|actually|rather|instead|so|therefore|thus|hence|then|finally|aber|also|mais|pero|mas"
BOX = r"\s*\$*\\f?box(?:ed)?\{"
TURN = re.compile(rf"[.!?\u3002]|\n(?!{BOX})|{_words(AGAINST)}|\u6240\u4ee5|\u56e0\u6b64|\u4f46|\u800c", re.IGNORECASE)
"""Words between two statements of which the later one corrects the earlier one."""
REASONS = r"because|since|as|and|or|but|which|for|due|so|with|would|must|should|seems|not|by|from|here|given|if|only|"
REASONS += r"und|oder|ou|et|weil|da|car|porque|rather|over|instead|"  # codespell:ignore oder
CONNECTIVE = re.compile(rf"(?:{REASONS}follows|fits|matches|can|has|gives|works|best|{IS})\b", re.IGNORECASE)
SENTENCE = re.compile(
    rf"\A|\n|[.!?\u3002]\s|{_words('so|therefore|thus|hence|finally')},?|\u56e0\u6b64|\u6240\u4ee5", re.IGNORECASE
)
JOINED = re.compile(rf"{AND}|{BOX}", re.IGNORECASE)
GOES_ON = re.compile(rf"[ \t]+(?!{AND}|{IS}\b|both\b)[^\W\d_]", re.IGNORECASE)  # with the words of another clause
FOLLOWING = re.compile(r"[ \t]+(?=[^\W\d_])")
REASON = re.compile(r"[).*_ \t]*\n|,?\s+(?:because|since|as|due)\b", re.IGNORECASE)


class Statement(NamedTuple):
    """Letters that a text names together, and where it begins and ends."""

    letters: str
    begin: int
    end: int


class LetterReader:
    """Reader of the choices among some letters, upper or lower case, one character each."""

    def __init__(self, letters: str) -> None:
        self._letters = letters.upper()
        one = rf"(?P<letter>[{re.escape(letters.upper() + letters.lower())}])"
        one = rf"(?<![{LATIN}]){one}(?![{LATIN}]|_\w|\s*=|\^|['\u2019][a-z])"
        around = rf"*_`\"'\u201c\u201d\u2018\u2019()\[\]{{}}$:<>~]|{LATEX}|{WORDS}"
        between = rf"[ \t,;?\u3001()\[\]{{}}*_\"'$]|\\[,;!:\ ]|{AND}|{BOX}"
        flags = re.IGNORECASE
        self._first = re.compile(_star("fill", rf"[\s{around}|{RATHER}") + one, flags)
        self._next = re.compile(_star("between", between) + _star("fill", rf"[\ \t{around}") + one, flags)
        self._alone = re.compile(one, flags)
        self._label = re.compile(rf"[\s*_(\[]*(?P<letter>[{re.escape(letters)}])[*_]*(?:[).:\]]| - )")
        self._together = re.compile(rf"(?<![{LATIN}])[{re.escape(letters)}]{{2,}}(?![{LATIN}])")
        self._brackets = re.compile(rf"(?:\(|\[|\*\*|(?<=\s)(?=.\))){one}(?:\)|\]|\*\*)", flags)
        self._nothing = re.compile(_star("words", rf"[\W_]|{AND}|{WORDS}"), flags)

    def without_ruled_out(self, text: str) -> str:
        """Return a text of the same length in which spaces replace the letters that it rules out."""
        for one in [*self._after(UNLIKE, text, lines=False), *self._before(RULED_OUT, text, commas=False)]:
            text = text[: one.begin] + " " * (one.end - one.begin) + text[one.end :]
        return text

    def label(self, text: str) -> str | None:
        """Return the letter before the text of a choice at the start, as in ``B) a whale``."""
        match = self._label.match(text)
        return match["letter"] if match else None

    def with_commas(self, text: str) -> str:
        """Return the text with ``A, B`` for ``AB``."""
        return self._together.sub(lambda together: ", ".join(together[0]), text)

    def several(self, reference: str) -> str | None:
        """Return the letters of a reference that consists of several different ones, as in ``AB`` and ``A and B``."""
        letters = self.whole(self.with_commas(reference)) or ""
        return letters if letters.isupper() and len(set(letters)) == len(letters) > 1 else None

    def statements(self, text: str, markers: Sequence[str]) -> list[Statement]:
        """Return the statements of choices in order, without those within others."""
        found = [*self._after(_leads(tuple(markers)), text), *self._before(CONFIRMED, text)]
        apart: list[Statement] = []
        for one in sorted(found, key=lambda one: (one.begin, -one.end)):
            if not apart or one.end > apart[-1].end:
                apart.append(one)
        return apart

    def whole(self, text: str) -> str | None:
        """Return the letters of a text of letters alone; None if there is more in it."""
        letters = "".join(self._alone.findall(text))
        return letters if letters and self._nothing.fullmatch(self._alone.sub(" ", text)) else None

    def last_sentence(self, text: str) -> str | None:
        """Return the letters of a last line or sentence of letters alone."""
        text = text.rstrip()
        for start in reversed(list(SENTENCE.finditer(text, max(0, len(text) - SPAN)))):
            one = self._at(text, start.end())
            if one is not None and not re.search(r"\w", text[one.end :]):
                cut = text.endswith("A") and start[0][:1] in tuple(".!?")  # may be the article of a sentence
                return None if cut else one.letters
        return None

    def first_label(self, text: str) -> str | None:
        """Return the letter before a text that is a choice; several if it repeats the choices."""
        one = self._at(text, 0)
        if one is not None and REASON.match(text, one.end):
            return one.letters
        if (first := self.label(text)) is None:
            return None
        labels = re.findall(rf"(?:^|\s)\(?([{re.escape(self._letters)}])[).:]", text)
        copied = len(labels) > 2 and self._letters.startswith("".join(labels))
        return "".join(labels) if copied or re.search(rf"{AND}\s+\(?[{re.escape(self._letters)}][).:]", text) else first

    def letter_in_brackets(self, text: str, *, any_case: bool) -> str:
        """Return the last letter in brackets or bold, or the letters that are named with it; empty for none."""
        found: list[Statement] = []
        for match in self._brackets.finditer(text):
            if not any_case and match["letter"] not in self._letters:
                continue
            one = self._at(text, match.start("letter")) or Statement(match["letter"], match.start(), match.end())
            if not found or one.end > found[-1].end:
                found.append(one)
        letters = "".join(one.letters for one in found)
        copied = len(letters) > 2 and letters == self._letters[: len(letters)]
        return letters if copied or not found else found[-1].letters

    def _after(self, leads: re.Pattern[str], text: str, *, lines: bool = True) -> Iterator[Statement]:
        """Yield the letters after words that lead to them, also in a later line with ``lines``."""
        read = 0
        for lead in leads.finditer(text):
            if lead.end() <= read or (one := self._at(text, lead.end())) is None:
                continue
            if lines or "\n" not in text[lead.end() : one.begin]:
                read = one.end
                yield Statement(one.letters, lead.start(), one.end)

    def _before(self, tail: re.Pattern[str], text: str, *, commas: bool = True) -> Iterator[Statement]:
        read = 0
        for place in self._alone.finditer(text):
            if place.start() < read or (one := self._at(text, place.start(), commas=commas)) is None:
                continue
            read = one.end
            if (end := tail.match(text, one.end)) is None:
                continue
            if not commas and SINGULAR.search(end[0]):  # in "B and A is wrong" it is the last one
                one = Statement(one.letters[-1], text.rindex(one.letters[-1], 0, one.end), one.end)
            yield one._replace(end=end.end())

    def _at(self, text: str, place: int, *, commas: bool = True) -> Statement | None:
        """Return the letters that a text names from a place on."""
        match = self._first.match(text, place)
        if match is None or _is_article(text, match):
            return None
        letters, begin, end = match["letter"], match.start("letter"), match.end()
        while (match := self._next.match(text, end)) and not _is_article(text, match):
            joined = JOINED.search(match["between"])
            if not joined and (not commas or GOES_ON.match(text, match.end())):
                break
            letters, end = letters + match["letter"], match.end()
        return Statement(letters, begin, end)


def _is_article(text: str, match: re.Match[str]) -> bool:
    """Return True for the word ``a`` or ``I`` before another word; a capital within a sentence is a letter."""
    place = match.start("letter")
    following = FOLLOWING.match(text, place + 1)
    if following is None or text[place] not in "aAiI" or CONNECTIVE.match(text, following.end()):
        return False
    before = text[max(0, place - 20) : place]
    if re.search(rf"{OPTION}\s*$", before, re.IGNORECASE):
        return False
    return text[place] != "A" or (text[following.end()].islower() and not re.search(r"[^\W\d_]\s$", before))


@lru_cache(maxsize=64)
def _leads(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join((*([markers_pattern(markers).pattern] if markers else []), *LEADS)), re.IGNORECASE)


@lru_cache(maxsize=64)
def letter_reader(letters: str) -> LetterReader:
    """Return the reader of some letters."""
    return LetterReader(letters)
