"""Documents -> packs: rows of a fixed capacity, filled with whole documents. Numpy only.

A pack is a row for everything downstream: the plan plans the packs' lengths, the sampler draws packs.

    packing = Packing.build(lengths, capacity=2048)
    plan = Plan.build(packing.lengths, TokenBatching(...), seed=0)

Which documents share a pack is decided once a run, from the lengths and the seed alone, so it is the same
on every rank and in every epoch; the plan shuffles the packs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.budget import TooLong
from hf_dist.batching.steps.cost import check_lengths
from hf_dist.errors import ConfigError, DataError


def pack(lengths: Any, capacity: int, *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Fills packs by best fit: the longest document first, each into the fullest pack that has room.

    Best fit decreasing never needs more than 11/9 of the fewest packs possible (+ 1; Johnson 1973,
    "Near-optimal bin packing algorithms"), and close to the fewest where some documents are short.
    Documents of one length are placed together and packs of one room are interchangeable, so the work
    grows with the number of different lengths and rooms rather than with documents x packs.

    Args:
        lengths: tokens of each document, whole numbers of shape (n,), none above `capacity`. Empty
            documents go into the last pack.
        capacity: tokens that a pack holds at most.
        seed: which documents of equal length share a pack.

    Returns:
        (documents, offsets): pack `i` holds `documents[offsets[i] : offsets[i + 1]]`, document numbers in
        rising order; each document stands in exactly one pack.

    Raises:
        ConfigError: the capacity is below 1.
        DataError: the lengths are no lengths, or one exceeds the capacity.
    """
    if capacity < 1:
        raise ConfigError(f"the capacity of a pack is {capacity}; it must be at least 1 token")
    sizes = _check(lengths)
    count = len(sizes)
    if count and int(sizes.max()) > capacity:
        raise DataError(
            f"a document of {int(sizes.max())} tokens exceeds the capacity of {capacity}; cut it, raise the "
            "capacity, or choose a policy for long documents"
        )
    # The shuffle breaks ties: neighbours of a corpus are often of one source, and a pack's documents stay
    # together in every epoch.
    order = np.random.default_rng(seed).permutation(count)
    order = order[np.argsort(-sizes[order], kind="stable")]
    pack_of, packs = _best_fit(sizes[order], capacity)
    documents = order[np.lexsort((order, pack_of))]
    offsets = np.zeros(packs + 1, dtype=np.int64)
    np.cumsum(np.bincount(pack_of, minlength=packs), out=offsets[1:])
    return documents.astype(np.int64, copy=False), offsets


def _check(lengths: Any) -> NDArray[np.int64]:
    checked = check_lengths(lengths)
    if checked.ndim != 1:
        raise DataError(
            f"documents have {checked.shape[1]} lengths each; packing needs one: a causal model's"
        )
    return checked.astype(np.int64)


def _best_fit(falling: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Pack number of each document of falling length, and the number of packs."""
    starts = np.flatnonzero(np.diff(falling, prepend=capacity + 1))
    counts = np.diff(starts, append=len(falling))
    assigned: list[int] = []
    packs = 0
    rooms: list[int] = []  # Rooms of open packs, rising, each once.
    open_packs: dict[int, list[int]] = {}
    for size, count in zip(falling[starts].tolist(), counts.tolist(), strict=True):
        if size == 0:
            packs = max(packs, 1)
            assigned += [packs - 1] * count
            continue
        left = count
        while left:
            place = bisect_left(rooms, size)
            fits = place < len(rooms)
            room = rooms[place] if fits else capacity
            # A pack that took one document of this size is now the fullest with room: it takes as many
            # as it can before the next pack gets any.
            each = min(room // size, left)
            number = left // each
            if fits:
                held = open_packs[room]
                taken = held[-number:]
                del held[-number:]
                if not held:
                    del rooms[place], open_packs[room]
            else:
                taken = list(range(packs, packs + number))
                packs += number
            # Documents of one size are interchangeable: which of them goes where is free.
            assigned += taken * each
            left -= len(taken) * each
            room -= each * size
            if room in open_packs:
                open_packs[room] += taken
            elif room:
                open_packs[room] = taken
                insort(rooms, room)
    return np.array(assigned, dtype=np.int64), packs


def fewest_packs(lengths: Any, capacity: int) -> int:
    """A number of packs that no packing can go below.

    For a threshold `a <= capacity / 2`: documents above half the capacity need a pack each; the room that
    those of at most `capacity - a` leave is all there is for documents in `[a, capacity / 2]`, and what
    exceeds it needs further packs. The largest over all thresholds is the bound L2 of Martello & Toth 1990
    ("Lower bounds and reduction procedures for the bin packing problem", Discrete Applied Mathematics 28).

    Args:
        lengths: tokens of each document, whole numbers of shape (n,), none above `capacity`.
        capacity: tokens that a pack holds at most.
    """
    sizes = np.sort(_check(lengths))
    sums = np.concatenate([[0], np.cumsum(sizes)])
    small = int(np.searchsorted(sizes, capacity // 2, side="right"))
    big = len(sizes) - small
    thresholds = np.unique(np.append(sizes[:small], 0))
    shared = np.searchsorted(sizes, capacity - thresholds, side="right")
    room = (shared - small) * capacity - (sums[shared] - sums[small])
    wanted = sums[small] - sums[np.searchsorted(sizes, thresholds)]
    further = -((room - wanted) // capacity)
    return big + max(0, int(further.max()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Which documents share a row. Build it with `Packing.build`.

    Attributes:
        capacity: tokens that a pack holds at most; only a document that stands alone as too long exceeds it.
        documents: document numbers, pack by pack.
        offsets: pack `i` holds `documents[offsets[i] : offsets[i + 1]]`.
        document_lengths: tokens of each document of the data set, by its number.
        lengths: tokens of each pack, shape (packs,): what the plan takes.
        dropped: numbers of the documents left out by `too_long="drop"`.
    """

    capacity: int
    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    document_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]
    dropped: NDArray[np.int64]

    @classmethod
    def build(cls, lengths: Any, capacity: int, *, too_long: TooLong = "error", seed: int = 0) -> Packing:
        """Packs all documents, each exactly once.

        Args:
            lengths: tokens of each document, whole numbers of shape (n,).
            capacity: tokens that a pack holds at most.
            too_long: a document above the capacity: "error", "alone" (a pack of its own, longer than the
                capacity; the plan's own cap decides about it) or "drop".
            seed: which documents of equal length share a pack.

        Raises:
            ConfigError: the capacity is below 1, or there is no such policy.
            DataError: the lengths are no lengths, or a document exceeds the capacity under "error".
        """
        if too_long not in ("error", "alone", "drop"):
            raise ConfigError(f"--too_long is {too_long!r}; expected error, alone or drop")
        sizes = _check(lengths)
        over = np.flatnonzero(sizes > capacity)
        if capacity >= 1 and len(over) and too_long == "error":
            raise DataError(
                f"{len(over)} documents exceed the capacity of {capacity} tokens (document {over[0]} has "
                f"{sizes[over[0]]}); raise the capacity, cut the documents, or give --too_long alone or drop"
            )
        within = np.flatnonzero(sizes <= capacity)
        documents, offsets = pack(sizes[within], capacity, seed=seed)
        documents = within[documents]
        if too_long == "alone":
            documents = np.concatenate([documents, over])
            offsets = np.concatenate([offsets, offsets[-1] + 1 + np.arange(len(over))])
        ends = np.concatenate([[0], np.cumsum(sizes[documents])])[offsets]
        return cls(
            capacity=capacity,
            documents=documents,
            offsets=offsets,
            document_lengths=sizes,
            lengths=np.diff(ends),
            dropped=over if too_long == "drop" else over[:0],
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def documents_of(self, pack: int) -> NDArray[np.int64]:
        """Document numbers of a pack, in the order they stand in its row."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        return self.documents[self.offsets[pack] : self.offsets[pack + 1]]

    @property
    def efficiency(self) -> float:
        """Tokens over the room of all packs (one that is longer than the capacity counts as full)."""
        room = int(np.maximum(self.lengths, self.capacity).sum())
        return float(self.lengths.sum()) / room if room else 1.0

    @property
    def fewest(self) -> int:
        """A number of packs that no packing of these documents can go below (see `fewest_packs`)."""
        sizes = self.document_lengths
        over = int((sizes > self.capacity).sum())
        alone = over - len(self.dropped)
        return alone + fewest_packs(sizes[sizes <= self.capacity], self.capacity)

    def metrics(self) -> dict[str, float]:
        """The figures by name, for a tracker."""
        return {
            "packing_efficiency": self.efficiency,
            "packing_packs": float(len(self)),
            "packing_fewest_packs": float(self.fewest),
            "packing_documents": float(len(self.documents)),
            "packing_documents_per_pack": len(self.documents) / max(1, len(self)),
            "packing_dropped_documents": float(len(self.dropped)),
        }

    def lines(self) -> list[str]:
        """The report as text."""
        dropped = f", {len(self.dropped):,} dropped as too long" if len(self.dropped) else ""
        return [
            f"packing: {len(self.documents):,} documents{dropped} in {len(self):,} packs of "
            f"{self.capacity:,} tokens ({len(self.documents) / max(1, len(self)):.1f} a pack); "
            f"no packing needs fewer than {self.fewest:,}",
            f"packing efficiency {self.efficiency:.4f} (tokens / room)",
        ]
