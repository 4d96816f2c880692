"""Which samples make optimizer step n: a pure function, the same on every rank, machine and restart."""

import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


class Schedule:
    """The order of training: at each optimizer step, G samples of one bucket.

    Every bucket is an endless stream of permutations, one per epoch, cut into blocks of G = `global_batch`; what does
    not fill a block rides into the next epoch. Buckets are served in proportion to their sizes: over any number of
    steps a bucket is within 1 + log2(number of buckets) blocks of its exact share. Nothing is replayed and nothing is
    kept that a checkpoint would have to save.
    """

    def __init__(self, sizes: dict[str, int], global_batch: int, seed: int):
        if not sizes or min(sizes.values()) < 1 or global_batch < 1:
            raise ValueError(f"need buckets with samples and a global batch above 0, got {sizes} and {global_batch}")
        self.sizes = dict(sorted(sizes.items()))  # the order in which buckets were found must not matter
        self.global_batch, self.seed = global_batch, seed
        self.total = sum(sizes.values())
        self._orders: dict[str, dict[int, np.ndarray]] = {name: {} for name in sizes}
        self._lock = threading.Lock()  # threads that read ahead ask while the loop does

    def block(self, step: int) -> tuple[str, list[int]]:
        """Bucket of optimizer step `step` (from 0) and the indices of its G samples within that bucket."""
        name, turn = self._serve(step)
        picks = []
        for epoch, first, count in self._pieces(name, turn):
            with self._lock:
                order = self._order(name, epoch)
            picks += order[first : first + count].tolist()
        return name, picks

    def epochs(self, step: int) -> list[int]:
        """The epoch of its bucket in which each of the G samples of a step is seen."""
        return [epoch for epoch, _, count in self._pieces(*self._serve(step)) for _ in range(count)]

    def epoch(self, step: int) -> float:
        """Samples seen before step `step`, in units of the data set."""
        return step * self.global_batch / self.total

    def _serve(self, step: int) -> tuple[str, int]:
        """The bucket of a step, and how many steps it had before.

        The list of buckets is split in half again and again. Of the first k steps that reach a split, the left half
        gets (k * left + total // 2) // total: exact, within 1/2 of its share, and counted without looking back.
        """
        names, turn = list(self.sizes), step
        while len(names) > 1:
            half = len(names) // 2
            left = sum(self.sizes[name] for name in names[:half])
            total = sum(self.sizes[name] for name in names)
            before, after = ((k * left + total // 2) // total for k in (turn, turn + 1))
            names, turn = (names[:half], before) if after > before else (names[half:], turn - before)
        return names[0], turn

    def _pieces(self, name: str, turn: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, first place in its permutation, how many) of the parts that a bucket's block `turn` is made of."""
        at, end, size = turn * self.global_batch, (turn + 1) * self.global_batch, self.sizes[name]
        while at < end:
            epoch, first = divmod(at, size)
            count = min(size - first, end - at)
            yield epoch, first, count
            at += count

    def _order(self, name: str, epoch: int) -> np.ndarray:
        """The permutation of one bucket in one epoch; the last two per bucket are kept."""
        orders = self._orders[name]
        if epoch not in orders:
            digest = hashlib.sha256(f"{self.seed}/{name}/{epoch}".encode()).digest()
            # RandomState, because NumPy promises that its stream never changes, unlike default_rng and torch
            state = np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32))
            while len(orders) > 1:
                del orders[min(orders)]
            # what state.permutation(size) gives, in half the memory: shuffling draws by length alone
            size = self.sizes[name]
            order = np.arange(size, dtype=np.int32 if size <= 2**31 else np.int64)
            state.shuffle(order)
            orders[epoch] = order
        return orders[epoch]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack samples to [B, ...]. A key whose rows differ in their first size is padded at the end with zeros (masks
    with False) to the longest: text. Any other difference is an error that names the key."""
    keys = rows[0].keys()
    if odd := [sorted(row) for row in rows if row.keys() != keys]:
        raise ValueError(f"samples of one batch have other keys: {sorted(keys)} and {odd[0]}")
    return {key: _stack(key, [row[key] for row in rows]) for key in keys}


def _stack(key: str, values: list[Tensor]) -> Tensor:
    kinds = {(value.shape[1:], value.dtype, value.ndim) for value in values}
    if len(kinds) > 1:
        found = ", ".join(sorted({f"{value.dtype} {list(value.shape)}" for value in values}))
        raise ValueError(f"{key}: rows differ in more than their first size: {found}")
    if len({value.shape for value in values}) == 1:
        return torch.stack(values)
    out = values[0].new_zeros(len(values), max(len(value) for value in values), *values[0].shape[1:])
    for row, value in zip(out, values, strict=True):
        row[: len(value)] = value
    return out


class MicroBatches(torch.utils.data.Dataset):
    """Item n is this rank's micro-batch n (step n // accumulation): (slots, bucket, indices, collated rows).

    A slot is a sample's place in the global batch, (micro * world + rank) * batch_size + row, so N ranks together take
    what one rank takes with N times the accumulation. `read(bucket, index, epoch)` gives one sample's tensors.
    """

    def __init__(self, schedule: Schedule, read, batch_size: int, accumulation: int, rank: int, world: int):
        self.schedule, self.read = schedule, read
        self.batch_size, self.accumulation, self.rank, self.world = batch_size, accumulation, rank, world

    def __getitem__(self, n: int) -> tuple[list[int], str, list[int], dict[str, Tensor]]:
        step, micro = divmod(n, self.accumulation)
        bucket, picks = self.schedule.block(step)
        first = (micro * self.world + self.rank) * self.batch_size
        slots = list(range(first, first + self.batch_size))
        picks, epochs = [picks[slot] for slot in slots], self.schedule.epochs(step)
        rows = [self.read(bucket, index, epochs[slot]) for slot, index in zip(slots, picks, strict=True)]
        return slots, bucket, picks, collate(rows)


def turn(bucket: str, index: int, epoch: int, seed: int, of: str, count: int) -> int:
    """Which of `count` captions or crops a sample trains on in an epoch: one after the other, from a keyed start."""
    if count == 1:
        return 0
    digest = hashlib.sha256(f"{seed}/{bucket}/{index}/{of}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") + epoch) % count
