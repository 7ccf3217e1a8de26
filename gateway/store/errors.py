"""Errors between the gateway and its database. None of them ever fails a query.

StoreError                has a sentence that a person can act on; stops the start of a process
├── SchemaMismatch        the tables are older or newer than this program
├── JournalTaken          another process writes to the same journal
├── StoreUnavailable      the database does not answer now: try again later
└── RecordsRefused        the database will never take these values: trying again is useless
"""

from __future__ import annotations


class StoreError(Exception):
    pass


class SchemaMismatch(StoreError):
    pass


class JournalTaken(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class RecordsRefused(StoreError):
    pass
