"""Keeps the lines of one batch, in columns, from its reading until they are written in the order of running.

50,000 objects would take 20 MB, and every collection of garbage meanwhile would look at each of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from gateway.batches.groups import PrefixGroups, sharing
from gateway.batches.order import Integers, LineSizes, order
from gateway.batches.values import Line, Order, Outline
from gateway.routing.prefixes import Prefix


class LineTable:
    """The lines in the order of the file."""

    def __init__(self) -> None:
        self.custom_ids: list[str] = []
        self.numbers, self.begins, self.sizes, self.prompt_tokens = (array("q") for _ in range(4))
        self.response_tokens = array("d")
        self._groups = PrefixGroups()

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, line: Line, prefix: Prefix) -> None:
        """Add the next line, whose place and group are not known yet."""
        self.numbers.append(line.number)
        self.custom_ids.append(line.custom_id)
        self.begins.append(line.begins)
        self.sizes.append(line.size)
        self.prompt_tokens.append(line.prompt_tokens)
        self.response_tokens.append(line.response_tokens)
        self._groups.add(prefix)

    def in_order(self, how: Order, at_once: int) -> OrderedLines:
        """Find the groups and the order of running, `at_once` lines at a time.

        Takes a tenth of a second for 50,000 lines, of which other threads wait for little: NumPy sorts
        without the interpreter's lock.
        """
        groups = self._groups.find()
        prompt_tokens = np.frombuffer(self.prompt_tokens, np.int64)
        response_tokens = np.frombuffer(self.response_tokens, np.float64)
        saved = sharing(groups, prompt_tokens)
        sizes = LineSizes(
            np.frombuffer(self.numbers, np.int64)[groups.first],
            (groups.share * prompt_tokens).astype(np.int64),
            prompt_tokens,
            response_tokens,
        )
        outline = Outline(
            saved.groups, int(prompt_tokens.sum()), saved.tokens, round(float(response_tokens.sum()))
        )
        return OrderedLines(self, sizes, order(sizes, how, at_once), outline)


class OrderedLines:
    """The lines in the order of running. A line is built when its turn comes."""

    def __init__(self, table: LineTable, sizes: LineSizes, turns: Integers, outline: Outline) -> None:
        self._table, self._sizes, self._turns = table, sizes, turns
        self.outline = outline

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Line]:
        table, sizes = self._table, self._sizes
        for place, index in enumerate(self._turns):
            yield Line(
                number=table.numbers[index],
                place=place,
                custom_id=table.custom_ids[index],
                begins=table.begins[index],
                size=table.sizes[index],
                prompt_tokens=table.prompt_tokens[index],
                response_tokens=table.response_tokens[index],
                group=int(sizes.group[index]),
                shared_tokens=int(sizes.shared_tokens[index]),
            )
