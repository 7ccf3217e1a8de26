"""Counts what a JSON text nests before it is decoded.

A decoder takes microseconds for every object, list and field, and holds the whole process meanwhile: a body
of 8 MiB that nests half a million of them took more than a second.
"""

from __future__ import annotations

MAX_STRUCTURE = 2**17
"""Objects, lists and fields of objects in one body: eight for each object that a request may hold."""
STRUCTURE = b"{[:"
VALUES = STRUCTURE + b","
"""Counts the items of lists, too: those that are numbers are what is slow to decode in Python's own way."""
SLICE_BYTES = 2**18


def exceeds(raw: bytes, most: int, slice_bytes: int = SLICE_BYTES, signs: bytes = STRUCTURE) -> bool:
    """Return whether a JSON text has more than `most` objects, lists and fields. A text that has that many of
    their signs is read in slices, between which other threads run: those within strings do not count.
    """
    if sum(map(raw.count, signs)) <= most:
        return False
    count, begin, in_string = 0, 0, False
    while begin < len(raw) and count <= most:
        end = begin + slice_bytes
        piece = raw[begin:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # cut no escape in two
            end += 1
            piece = raw[begin:end]
        begin = end
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[in_string::2])
        count += len(outside) - len(outside.translate(None, signs))
        in_string ^= len(parts) % 2 == 0
    return count > most
