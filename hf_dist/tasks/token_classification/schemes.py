"""How tags make entities: the scheme of a data set's tags, told by the tags and by how entities open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_dist.errors import ConfigError

logger = logging.getLogger(__name__)

Scheme: TypeAlias = Literal["plain", "iob1", "iob2", "iobes", "bilou"]
WantedScheme: TypeAlias = Literal["auto", "plain", "iob1", "iob2", "iobes", "bilou"]
_PREFIXES: dict[Scheme, str] = {"iob1": "IB", "iob2": "BI", "iobes": "BIES", "bilou": "BILU"}
_SHOWN = 5


@dataclass(frozen=True)
class Openings:
    """How entities open in tagged rows; what tells IOB1, where a B- only parts two entities of a type.

    Attributes:
        inside: I- tags that follow no tag of their type: they open entities in IOB1, and are wrong in IOB2.
        begin: B- tags that follow no tag of their type: they open entities in IOB2, and are wrong in IOB1.
    """

    inside: int = 0
    begin: int = 0


_UNCOUNTED = Openings()


def openings(tags: pa.ChunkedArray, ends: np.ndarray) -> Openings:
    """Counts them.

    Args:
        tags: the tags of all rows, one after another.
        ends: (rows + 1,) where each row starts; the last entry is the number of tags.
    """
    coded = pc.dictionary_encode(tags.combine_chunks())
    names = coded.dictionary.to_pylist()
    place = coded.indices.to_numpy(zero_copy_only=False)
    letter = np.array([name[:1] if name[1:2] in ("", "-") else "" for name in names])
    kinds = {kind: at for at, kind in enumerate(dict.fromkeys(name[2:] for name in names))}
    kind = np.array([kinds[name[2:]] if letter[at] in ("B", "I") else -1 for at, name in enumerate(names)])
    kind_of_word = kind[place]
    before = np.concatenate([[-1], kind_of_word[:-1]])
    before[ends[:-1]] = -1
    opens = (kind_of_word >= 0) & (kind_of_word != before)
    return Openings(*(int(np.sum(opens & (letter[place] == which))) for which in "IB"))


def recognise(classes: Sequence[str], wanted: WantedScheme, found: Openings = _UNCOUNTED) -> Scheme:
    """The scheme of the tags: the one that is wanted, or what they look like.

    Entities have tags of a letter, a hyphen and a type (or the letter alone), and O stands outside. E- and S-
    make it IOBES, L- and U- BILOU. B- and I- are IOB1 where more entities open with an I- than with a B- that
    follows no tag of its type (or where there is no B-), else IOB2. All other sets of tags are plain.

    Args:
        classes: the tags.
        wanted: what the user says.
        found: how entities open in the rows.

    Raises:
        ConfigError: the tags don't fit the wanted scheme.
    """
    if wanted == "plain":
        return "plain"
    letters = {name[:1] for name in classes if name != "O"}
    entities = bool(letters) and all(name == "O" or _is_entity(name) for name in classes)
    # One-letter tags alone, such as parts of speech, are no entities without an O.
    entities = entities and ("O" in classes or all(len(name) > 1 for name in classes))
    if wanted != "auto":
        if not entities or not letters <= set(_PREFIXES[wanted]):
            allowed = ", ".join(f"{letter}-TYPE" for letter in _PREFIXES[wanted])
            raise ConfigError(
                f"--tag_scheme {wanted}: the tags are {', '.join(classes[:12])}; expected O, {allowed}"
            )
        return wanted
    if not entities:
        return "plain"
    if letters <= set("BI") and (found.inside > found.begin or letters == {"I"}):
        return "iob1"
    rest: tuple[Scheme, ...] = ("iob2", "iobes", "bilou")
    return next((scheme for scheme in rest if letters <= set(_PREFIXES[scheme])), "plain")


def log_scheme(classes: Sequence[str], scheme: Scheme, found: Openings) -> None:
    """Says in one line which scheme it is, and warns of tags that are not in it."""
    logger.info("%d tags, scheme %s", len(classes), _NAMES[scheme])
    if scheme == "plain":
        odd = [name for name in classes if name != "O" and not _is_entity(name)]
        if "O" in classes and 0 < len(odd) < len(classes) / 2:
            logger.warning(
                "no tag of an entity, as most others are: %s; each tag counts by itself until that is mended",
                ", ".join(odd[:_SHOWN]),
            )
    wrong = {"iob1": found.begin, "iob2": found.inside}.get(scheme, 0)
    if wrong:
        what = "with a B- that no tag of its type precedes" if scheme == "iob1" else "with an I-"
        logger.warning(
            "%d entities open %s, which is not well formed in %s: they count unless --entity_mode is strict",
            wrong,
            what,
            scheme.upper(),
        )


_NAMES: dict[Scheme, str] = {
    "plain": "plain: each tag counts by itself",
    "iob1": "IOB1: an I- opens an entity, a B- only where one of the same type goes before",
    "iob2": "IOB2: a B- opens each entity",
    "iobes": "IOBES",
    "bilou": "BILOU",
}


def _is_entity(name: str) -> bool:
    return name[:1] in tuple("BIESLU") and (len(name) == 1 or (name[1] == "-" and len(name) > 2))


def inside_of(classes: Sequence[str]) -> tuple[int, ...]:
    """For each tag, the one that the later sub-words of its word get: I- of the same type after B-."""
    place = {name: at for at, name in enumerate(classes)}
    return tuple(place.get(f"I{name[1:]}", at) if name[:1] == "B" else at for at, name in enumerate(classes))
