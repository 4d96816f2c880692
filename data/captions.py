"""What a caption is trained as: without a language model's preamble, in several orders of its tags, prefix first."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence

_MEDIUM = r"(?:video clip|video|clip|footage|film|animation|scene|image|picture|photograph|photo|gif)"
_THE = rf"(?:the|this) (?:(?:short|given|provided|animated) )?{_MEDIUM}"
_SHOWS = (
    r"(?:(?:appears|seems) to (?:show|depict|feature|capture)|shows|showcases|depicts|features|displays|portrays|"
    r"presents|captures|illustrates|demonstrates|(?:begins|starts|opens) with)"
)
_NOT_SEEN = r"(?!(?:off|up|how|what|why|when|where|who|whether|signs)\b)"  # "shows off", "shows how": a sentence's own
_WE_SEE = r"(?:we|you|one) (?:can )?see "
_PREAMBLES = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:sure|certainly|of course|absolutely)[!,.]\s+(?=here)",
        r"here(?:'s|\u2019s| is| are) (?:\S+ ){0,5}?(?:description|caption|prompt|summary)s?\b[^:.\n]{0,60}:\s+",
        r"\W{0,2}(?:(?:video|image) )?(?:caption|description):\W{0,2}\s+",
        rf"{_THE} {_SHOWS} (?:that )?{_NOT_SEEN}",
        rf"{_THE} is (?=an? )",
        r"this is (?:an? )(?:\S+ )?(?:video|clip|image|picture|photograph|photo) (?:of|showing|depicting) ",
        rf"in {_THE}(?:, (?:{_WE_SEE})?| {_WE_SEE})",
    )
]


def prepare(
    captions: Sequence[str], prefix: str = "", tag_shuffle: int = 0, keep_tags: int = 0, strip: bool = False
) -> tuple[str, ...]:
    """All texts that a clip is trained with, in turn; its captions begin with `prefix`, which stays in front.

    Each caption has the same share of them: one with fewer orders than another is repeated.
    """
    texts = [caption.removeprefix(prefix) for caption in captions]
    if strip:
        texts = [strip_preamble(text) for text in texts]
    orders = [variants(text, tag_shuffle, keep_tags) for text in texts]
    most = max(map(len, orders))
    turns = zip(*(itertools.islice(itertools.cycle(own), most) for own in orders), strict=True)
    return tuple(prefix + text for turn in turns for text in turn)


def variants(caption: str, orders: int, keep: int) -> tuple[str, ...]:
    """Up to `orders` different orders of the tags (between commas), the first `keep` in their places.

    They depend on the caption alone, and more orders begin with the same ones: nothing is encoded twice. A caption that
    has but one order stays as it is written, as do all for 0 orders.
    """
    tags = [tag for tag in (part.strip() for part in caption.split(",")) if tag]
    kept, rest = tags[:keep], tags[keep:]
    if not orders or len(set(rest)) < 2:
        return (caption,)
    wanted, found = _count(rest, orders), {}
    key = hashlib.sha256(caption.encode()).digest()
    for draw in itertools.count():
        rank = [hashlib.sha256(key + f"/{draw}/{place}".encode()).digest() for place in range(len(rest))]
        places = sorted(range(len(rest)), key=rank.__getitem__)
        found[", ".join([*kept, *(rest[place] for place in places)])] = None
        if len(found) == wanted:
            break
    return tuple(found)


def _count(tags: Sequence[str], enough: int) -> int:
    """How many different orders the tags have, counted up to `enough`."""
    total, placed = 1, 0
    for same in Counter(tags).values():
        for n in range(1, same + 1):
            placed += 1
            total = total * placed // n
        if total >= enough:
            return enough
    return total


def strip_preamble(caption: str) -> str:
    """The caption without what language models say before a description; what follows begins with a capital."""
    text = caption
    while (found := next(filter(None, (pattern.match(text) for pattern in _PREAMBLES)), None)) and text[found.end() :]:
        text = text[found.end() :]
        text = text[0].upper() + text[1:]
    return text
