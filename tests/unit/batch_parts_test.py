"""A large answer to a line of a batch is made in parts, between which other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from gateway.batches.answer_line import join_parts

PARTS = 5


def test_others_get_a_turn_between_the_parts_of_a_large_answer() -> None:
    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        def parts() -> Iterator[bytes]:
            for number in range(PARTS):
                assert turns == number
                yield b"%d" % number

        task = asyncio.create_task(other())
        assert await join_parts(parts()) == b"01234"
        task.cancel()

    asyncio.run(main())
