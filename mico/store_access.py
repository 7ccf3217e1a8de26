"""Access to the database for commands that work with or without a running gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mico.errors import CommandFailed

if TYPE_CHECKING:
    from gateway.store.schema import StoredSchema
    from gateway.store.store import Store

T = TypeVar("T")
PEPPER_VARIABLE = "MICO_GATEWAY_KEY_PEPPER"
PEPPER_TIP = f"{PEPPER_VARIABLE}, or --folder with the gateways' key-pepper, gives theirs"
UNPREPARED_TIP = "mico up or mico db upgrade prepares it; --database names another"
TOO_NEW_TIP = "the newer version's mico reads it; --database names another"
UNREACHABLE_TIP = "see that it runs and that its address is right; --database names another"


def with_store(database_url: str, folder: Path, work: Callable[[Store], Awaitable[T]]) -> T:
    """Open the store, run `work` on it, and return its result.

    The pepper of the keys is that of the gateway: MICO_GATEWAY_KEY_PEPPER, as in its container, else the one
    in `folder`. Raises CommandFailed.
    """
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.store.database import reason
    from gateway.store.errors import (
        OtherPepper,
        SchemaMismatch,
        SchemaTooNew,
        StoreError,
        StoreUnavailable,
        TooManyKeys,
    )
    from gateway.store.quota_table import UnknownSubject
    from gateway.store.store import open_store

    async def visit() -> T:
        require_file(database_url)
        pepper = os.environ.get(PEPPER_VARIABLE)
        async with open_store(database_url, folder, pepper=pepper, serving=False) as store:
            return await work(store)

    try:
        return asyncio.run(visit())
    except UnknownSubject as error:
        raise CommandFailed(str(error), tip="mico tenants list and mico keys list name them") from error
    except TooManyKeys as error:
        raise CommandFailed("no key was made", cause=str(error), tip="mico keys list") from error
    except OtherPepper as error:
        raise CommandFailed("nothing was changed", cause=str(error), tip=PEPPER_TIP) from error
    except StoreUnavailable as error:
        raise CommandFailed("the database did not answer", cause=str(error), tip=UNREACHABLE_TIP) from error
    except SchemaMismatch as error:
        tip = TOO_NEW_TIP if isinstance(error, SchemaTooNew) else UNPREPARED_TIP
        raise CommandFailed("the database is not ready", cause=str(error), tip=tip) from error
    except StoreError as error:  # invalid URL, folder or pepper, which `mico db upgrade` cannot fix
        raise CommandFailed("the database can't be used", cause=str(error)) from error
    except SQLAlchemyError as error:
        raise CommandFailed(
            "the database did not answer", cause=reason(error), tip=UNREACHABLE_TIP
        ) from error


def require_file(database_url: str) -> None:
    """Raise SchemaMismatch if an SQLite file does not exist: opening it would create an empty database."""
    from gateway.store import database
    from gateway.store.errors import SchemaMismatch

    url = database.database_url(database_url)
    is_file = url.get_backend_name() == "sqlite" and "uri" not in url.query
    if is_file and not Path(url.database or "").exists():
        raise SchemaMismatch(f"there is no database {url.database}")


def upgrade(database_url: str) -> StoredSchema:
    """Upgrade the schema to the newest revision, and return the stored schema. Raises CommandFailed."""
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.store.database import reason
    from gateway.store.errors import SchemaTooNew, StoreError, TablesInUse
    from migrations import upgrade as run

    try:
        return run(database_url)
    except SchemaTooNew as error:
        raise CommandFailed("this version can't use the database", cause=str(error)) from error
    except TablesInUse as error:
        raise CommandFailed("the database was not upgraded", cause=str(error)) from error
    except StoreError as error:
        raise CommandFailed("the database URL does not work", cause=str(error)) from error
    except SQLAlchemyError as error:
        raise CommandFailed("the database did not answer", cause=reason(error)) from error
