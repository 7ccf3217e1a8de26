"""Requests of tests to servers that come and go, each on a connection of its own."""

from __future__ import annotations

import httpx

HTTP = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0), timeout=120)
"""`httpx.get` makes a client for each request, which reads the system's certificates for 50 ms."""
