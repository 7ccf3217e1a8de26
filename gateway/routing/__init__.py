"""Deciding: pure functions on frozen values. No I/O, no clock, no randomness but a seeded argument."""
