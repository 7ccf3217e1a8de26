"""Errors of commands, with cause, tip and exit status.

CommandFailed
└── GatewayUnavailable
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    WRONG_USAGE = 2
    PARTLY_FAILED = 3
    NOT_AUTHENTICATED = 4
    INTERRUPTED = 130


class CommandFailed(Exception):
    """Raised when a command fails. Printed as the lines `error:`, `cause:` and `tip:`, without empty ones."""

    def __init__(
        self, error: str, *, cause: str = "", tip: str = "", exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        super().__init__(error)
        self.error = error
        self.cause = cause
        self.tip = tip
        self.exit_code = exit_code

    def lines(self) -> list[str]:
        parts = {"error": self.error, "cause": self.cause, "tip": self.tip}
        return [f"{name}: {text}" for name, text in parts.items() if text]


class GatewayUnavailable(CommandFailed):
    """Raised when no gateway responds. The same request may succeed later."""
