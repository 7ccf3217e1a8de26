"""Turn the rows of an engine process's iterations into outputs of the answers that it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from site_engine.core.request import Output
from site_engine.engine.process_answer import Answer
from site_engine.engine.process_messages import Step


class Answers:
    """The answers by request number. Rows whose number is unknown are dropped.

    Tokens without details are held and read together, since detokenizing ten tokens of an answer costs little
    more than one. `end(number, generated)` is called when an answer's text ends it.
    """

    def __init__(self, end: Callable[[int, int], None]) -> None:
        self._end = end
        self._answers: dict[int, Answer] = {}
        self._numbers: dict[str, int] = {}  # by request id
        self._unread: dict[int, list[int]] = {}

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers.values())

    def add(self, number: int, answer: Answer) -> None:
        self._answers[number] = answer
        self._numbers[answer.request.id] = number

    def get(self, number: int) -> Answer | None:
        return self._answers.get(number)

    def number_of(self, request_id: str) -> int | None:
        return self._numbers.get(request_id)

    def of(self, request_id: str) -> Answer:
        """Return the answer to a known request."""
        return self._answers[self._numbers[request_id]]

    def pop(self, numbers: Iterable[int]) -> list[Answer]:
        """Remove answers and their unread tokens; return the answers."""
        answers = []
        for number in numbers:
            self._unread.pop(number, None)
            answers.append(self._answers.pop(number))
            del self._numbers[answers[-1].request.id]
        return answers

    def pop_all(self) -> list[Answer]:
        return self.pop(list(self._answers))

    def take(self, step: Step, now: float) -> list[Output]:
        """Take an iteration's rows; return the outputs of rows with details and of tokens before them."""
        outputs: list[Output] = []
        details = {detail.row: detail for detail in step.details}
        for row, (number, token_id) in enumerate(zip(step.numbers, step.token_ids, strict=True)):
            detail = details.get(row) if details else None
            if detail is None:
                self._unread.setdefault(number, []).append(token_id)
                continue
            if number in self._unread:
                outputs += self._read(number, self._unread.pop(number), now)
            answer = self._answers.get(number)
            if answer is None:
                continue
            if not answer.ended:
                output = answer.take_detailed(token_id, detail, now)
                outputs.append(output)
                if output.finish is not None and detail.finish is None:
                    self._end(number, answer.generated)
            if detail.finish is not None:
                self.pop([number])
        return outputs

    def read(self, now: float) -> list[Output]:
        """Return the outputs of all unread tokens."""
        unread, self._unread = self._unread, {}
        return [output for each in unread.items() for output in self._read(*each, now)]

    def _read(self, number: int, token_ids: Sequence[int], now: float) -> list[Output]:
        answer = self._answers.get(number)
        if answer is None or answer.ended:
            return []
        output = answer.take(token_ids, now)
        if output.finish is not None:  # ended by its text: the engine still computes it
            self._end(number, answer.generated)
        return [output]
