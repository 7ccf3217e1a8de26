"""Reads the headers with which a request limits its regions, its sites and its price."""

from __future__ import annotations

from math import isfinite

from litestar.types import Scope

from gateway.decision import PlacementLimits
from gateway.errors import BadRequest
from gateway.openai.fields import WRONG_VALUE

REGION, SITE, MAX_USD = b"x-mico-region", b"x-mico-site", b"x-mico-max-usd"
MAX_NAMES = 64


def read_limits(scope: Scope) -> PlacementLimits | None:
    """Return the limits of a request, None if it has none. Raises BadRequest."""
    given = {
        key: value.decode("latin-1") for key, value in scope["headers"] if key in (REGION, SITE, MAX_USD)
    }
    if not given:
        return None
    return PlacementLimits(_names(given, REGION), _names(given, SITE), _usd(given.get(MAX_USD)))


def _names(given: dict[bytes, str], header: bytes) -> frozenset[str] | None:
    if header not in given:
        return None
    names = frozenset(name for each in given[header].split(",") if (name := each.strip()))
    if not 0 < len(names) <= MAX_NAMES:
        raise BadRequest(f"The header {header.decode()} has 1 to {MAX_NAMES} names.", code=WRONG_VALUE)
    return names


def _usd(given: str | None) -> float | None:
    if given is None:
        return None
    try:
        usd = float(given)
    except ValueError:
        usd = -1.0
    if not (isfinite(usd) and usd >= 0):
        raise BadRequest("The header x-mico-max-usd is a number of dollars, such as 0.002.", code=WRONG_VALUE)
    return usd
