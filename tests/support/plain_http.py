"""Requests of tests to servers that come and go, each on a connection of its own."""

from __future__ import annotations

import ssl

import httpx

from tests.support.patience import patient

CERTIFICATES = ssl.create_default_context()
"""For the clients of tests: one that is made without reads the system's certificates for 40 ms."""
HTTP = patient(
    httpx.Client(verify=CERTIFICATES, limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
)
