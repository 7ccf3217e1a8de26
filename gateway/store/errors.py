"""Errors between the gateway and its database. None of them ever fails a query.

StoreError                has a sentence that a person can act on; stops the start of a process
├── SchemaMismatch        there are no tables, or they are older than this program
│   └── SchemaTooNew      a newer program has changed the tables so that this one can't use them
├── JournalTaken          another process writes to the same journal
├── StoreUnavailable      the database does not answer now: try again later
├── TablesInUse           a migration waited in vain for a table that another transaction keeps
├── TooManyKeys           replicas would hold more keys in memory than they may
├── OtherPepper           a key's secret is hashed with a pepper that this process does not have
└── RecordsRefused        the database will never take these values: trying again is useless
"""

from __future__ import annotations


class StoreError(Exception):
    pass


class SchemaMismatch(StoreError):
    pass


class SchemaTooNew(SchemaMismatch):
    pass


class JournalTaken(StoreError):
    pass


class StoreUnavailable(StoreError):
    pass


class TablesInUse(StoreError):
    pass


class RecordsRefused(StoreError):
    pass


class TooManyKeys(StoreError):
    pass


class OtherPepper(StoreError):
    pass
