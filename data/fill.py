"""Filling a cache: what it lacks is read ahead, encoded in batches and stored, beside whoever else fills it."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby

from torch import Tensor

from data.cache import Cache, DiskFull


@dataclass(frozen=True)
class Item:
    """One thing to encode: cache key, where it came from (for messages), what is encoded, who may share its batch."""

    key: str
    source: str
    content: object
    group: str = ""


def fill(
    cache: Cache,
    items: Sequence[Item],
    encode: Callable[[list], list[dict[str, Tensor]]],
    batch_size: int = 1,
    read: Callable | None = None,
    workers: int = 0,
    on_item: Callable[[Item], None] | None = None,
    note: dict[str, str] | None = None,
) -> int:
    """Encodes the items that `cache` lacks and stores each whole or not at all; returns how many were encoded.

    `encode` turns a list of contents (of one group) into one dict of tensors without batch dimension each. `read`, run
    in `workers` threads ahead of it, turns a content into what `encode` gets, such as a clip's decoded frames; only a
    few are in memory at a time. `on_item` is called for each item that is there then. `note`: kept with each entry.
    Raises data.cache.NonFinite, naming the source, when an encoding holds NaN or infinity, and data.cache.DiskFull.

    Batches are taken in an order of this call's own, and what another process has stored meanwhile is passed over. So
    two that fill one cache meet on few items (one batch in every r, when r are left), and no claim has to be kept
    alive, waited for or cleaned up after a killed run.
    """
    absent = cache.absent(item.key for item in items)
    waiting = sorted((item for item in unique(items) if item.key in absent), key=lambda item: item.group)
    parts = []
    for _, group in groupby(waiting, key=lambda item: item.group):
        group = list(group)
        parts += [group[start : start + batch_size] for start in range(0, len(group), batch_size)]
    random.SystemRandom().shuffle(parts)  # whole batches: what is encoded together does not depend on the order
    read, there = read or (lambda content: content), object()
    contents = ahead(
        lambda item: there if item.key in cache else read(item.content), list(chain.from_iterable(parts)), workers
    )
    done = 0
    for number, part in enumerate(parts):
        given = [(item, next(contents)) for item in part]
        mine = [(item, content) for item, content in given if content is not there and item.key not in cache]
        encoded = encode([content for _, content in mine]) if mine else []
        for (item, _), tensors in zip(mine, encoded, strict=True):
            try:
                cache.put(item.key, tensors, {"source": item.source} | (note or {}))
            except DiskFull as error:
                left = sum(map(len, parts[number:]))
                raise DiskFull(
                    f"{error}. Not stored yet: {left}, about {left * error.needed} bytes if all are like this one",
                    error.needed,
                ) from error
        done += len(mine)
        for item in part:
            if on_item:
                on_item(item)
    return done


def ahead(function: Callable, contents: Sequence, workers: int) -> Iterator:
    """function(content) of each content in order, by threads at most 2 * workers ahead; 0 workers: when asked."""
    if workers == 0:
        yield from map(function, contents)
        return
    with ThreadPoolExecutor(workers) as pool:
        running = []
        for content in contents:
            running.append(pool.submit(function, content))
            if len(running) > 2 * workers:
                yield running.pop(0).result()
        while running:
            yield running.pop(0).result()


def unique(items: Iterable[Item]) -> list[Item]:
    """The items without repeats of a key, in order: identical captions and clips are encoded once."""
    return list({item.key: item for item in items}.values())
