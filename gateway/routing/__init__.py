"""Routing decisions: pure functions on frozen values. No I/O, no clock; randomness is a seeded argument."""
