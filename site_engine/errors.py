"""The errors of a site, and their recipients.

    SiteError
    ├── ConfigError         the configuration cannot be used: the person who starts the site
    ├── NotServed           this attempt cannot be served here: the gateway, as a Rejected
    ├── WrongMessage        an invalid message of a gateway: the log; the message is dropped
    ├── LinkLost            a stream to a gateway is over or silent: the log; the link dials again
    ├── ModelNotSupported   the engine would not serve this model exactly: the start, as a ConfigError
    ├── NoMemory            a base can neither sleep nor wake: whoever ordered it; it stays as it was
    ├── VariantRefused      this variant cannot be added or removed: whoever ordered it; nothing has changed
    ├── TrainingRefused     this job cannot be trained here: whoever ordered it; nothing was trained
    ├── TransferFailed      content was not fetched or stored: the run, or the order, that needs it
    └── EngineBroken        the engine cannot go on: every open attempt as FAILED; the process ends

The engine's own answer `site_engine.core.request.RequestRejected` becomes `NotServed` in the engine thread.
"""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """The reason why an attempt was refused; the names of `Rejected.Reason` in wire/federation.proto."""

    FULL = "FULL"
    DRAINING = "DRAINING"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    CONTEXT_LENGTH = "CONTEXT_LENGTH"
    INVALID = "INVALID"
    UNSUPPORTED = "UNSUPPORTED"
    INTERNAL = "INTERNAL"


class SiteError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(SiteError):
    """The configuration cannot be used; the message names the setting."""


class NotServed(SiteError):
    """This attempt cannot be served here. `param` is the field of the client's request, empty if none."""

    def __init__(self, reason: Reason, message: str, param: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param


class WrongMessage(SiteError):
    """A gateway sent something that this protocol version does not allow."""


class LinkLost(SiteError):
    """The stream to a gateway is over, or nothing came over it for too long."""


class EngineBroken(SiteError):
    """The engine cannot go on; the process has to be started again."""


class ModelNotSupported(SiteError):
    """A model that the engine would not serve exactly; the message says why."""


class NoMemory(SiteError):
    """Memory that a device or the host does not have; the message says which."""


class VariantRefused(SiteError):
    """A variant that cannot be added or removed; the message says why. Nothing has changed."""


class TrainingRefused(SiteError):
    """A job that cannot be trained here; the message says why. `elsewhere`: another site may train it."""

    def __init__(self, message: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


class TransferFailed(SiteError):
    """Content was not fetched or stored. `final`: it is of no use to try again; `stale`: the run is not
    current.
    """

    def __init__(self, message: str, *, final: bool = False, stale: bool = False) -> None:
        super().__init__(message)
        self.final = final
        self.stale = stale


def describe(exc: BaseException) -> str:
    """Return the type of an exception and, where it has one, its message."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
