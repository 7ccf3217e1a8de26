"""Stores content that sites upload and fetch, by digest, in the parts of files."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

import grpc
from sqlalchemy.exc import SQLAlchemyError

from gateway.batches.files import PART_BYTES, Files, FileWriter
from gateway.federation.bulk import BulkRefused
from gateway.store.database import reason
from gateway.tuning.contents import Contents
from gateway.tuning.ledger import Ledger
from gateway.tuning.values import Content, Kind, TuningLimits
from wire import federation_pb2 as pb

MAX_UPLOADS: Final = 32
"""Unfinished uploads kept by this process. Beyond that, the oldest without an active call is dropped."""
DIGEST_BYTES: Final = 32
_KINDS: Final = {
    pb.StoreBegin.SNAPSHOT: Kind.SNAPSHOT,
    pb.StoreBegin.CHECKPOINT: Kind.CHECKPOINT,
    pb.StoreBegin.ADAPTER: Kind.ADAPTER,
}
_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE


class ContentStore:
    """Serves Fetch and Store. An interrupted upload is kept until MAX_UPLOADS newer ones have arrived."""

    def __init__(
        self,
        files: Files,
        ledger: Ledger,
        contents: Contents,
        limits: TuningLimits,
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._ledger = ledger
        self._contents = contents
        self._limits = limits
        self._clock = clock
        self._uploads: dict[tuple[str, bytes], ContentUpload] = {}

    async def read(self, sha256: bytes, offset: int) -> AsyncIterator[bytes]:
        """Yield content starting at an offset. Raises BulkRefused."""
        try:
            content = await self._contents.find(sha256.hex())
            if content is None:
                raise BulkRefused(grpc.StatusCode.NOT_FOUND, "there is no content of this digest")
            while offset < content.bytes:
                size = min(PART_BYTES - offset % PART_BYTES, content.bytes - offset)
                yield await self._files.read(content.file_id, offset, size)
                offset += size
        except LookupError as exc:
            raise BulkRefused(grpc.StatusCode.NOT_FOUND, "the content was removed") from exc
        except (SQLAlchemyError, OSError) as exc:
            raise BulkRefused(_UNAVAILABLE, f"the database is away: {reason(exc)}") from exc

    async def begin(self, begin: pb.StoreBegin) -> ContentUpload:
        """Start or resume an upload of the current run of a job. Raises BulkRefused."""
        size = begin.content.bytes
        if len(begin.content.sha256) != DIGEST_BYTES or begin.kind not in _KINDS or size == 0:
            raise BulkRefused(grpc.StatusCode.INVALID_ARGUMENT, "no kind, digest or size of content")
        if size > self._limits.content_bytes:
            most = self._limits.content_bytes
            raise BulkRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{size} bytes; {most} at most")
        try:
            if await self._ledger.current_run(begin.job_id) != begin.run:
                raise BulkRefused(grpc.StatusCode.FAILED_PRECONDITION, "the run is not current")
            key = begin.run, begin.content.sha256
            upload = self._uploads.pop(key, None)
            if upload is None or upload.is_open:
                upload = ContentUpload(self, begin, await self._files.begin(""))
            self._uploads[key] = upload
            upload.is_open = True
            surplus = max(0, len(self._uploads) - MAX_UPLOADS)
            cut = [each for each, its in self._uploads.items() if not its.is_open]
            for gone in [self._uploads.pop(each) for each in cut[:surplus]]:
                await self._discard(gone)
        except (SQLAlchemyError, OSError) as exc:
            raise BulkRefused(_UNAVAILABLE, f"the database is away: {reason(exc)}") from exc
        return upload

    async def finished(self, upload: ContentUpload) -> None:
        """Record a finished upload, and remove the content that it replaces. Raises BulkRefused.

        If the database did not confirm the record, the upload is kept, and expires if it was not recorded.
        """
        begin = upload.announced
        self._forget(upload)
        content = Content(
            job_id=begin.job_id,
            kind=_KINDS[begin.kind],
            step=begin.step,
            sha256=begin.content.sha256.hex(),
            bytes=begin.content.bytes,
            file_id=upload.writer.id,
            at=self._clock(),
        )
        await upload.writer.flush()
        replaced = await self._contents.add(content, begin.run)
        with suppress(SQLAlchemyError, OSError):  # the rest expires
            for file_id in [content.file_id] if replaced is None else replaced:
                await self._files.remove(file_id)
        if replaced is None:
            raise BulkRefused(grpc.StatusCode.FAILED_PRECONDITION, "the run is not current any more")

    async def drop(self, upload: ContentUpload) -> None:
        self._forget(upload)
        await self._discard(upload)

    async def remove_leftovers(self, limit: int) -> int:
        """Remove content that no job needs any more. Return the number of items."""
        found = await self._contents.find_leftovers(limit, self._clock() - self._limits.kept_s)
        for content in found:
            await self.remove(content)
        return len(found)

    async def remove(self, content: Content) -> bool:
        """Remove content, if it still exists. Training data is the client's file and stays."""
        removed = await self._contents.remove(content)
        if removed and content.kind not in (Kind.DATA, Kind.VALIDATION):
            await self._files.remove(content.file_id)
        return removed

    def _forget(self, upload: ContentUpload) -> None:
        key = upload.announced.run, upload.announced.content.sha256
        if self._uploads.get(key) is upload:
            del self._uploads[key]

    async def _discard(self, upload: ContentUpload) -> None:
        with suppress(SQLAlchemyError, OSError):  # the rest expires
            await upload.writer.discard()


class ContentUpload:
    """An unfinished upload. `is_open` while a call writes to it."""

    def __init__(self, store: ContentStore, announced: pb.StoreBegin, writer: FileWriter) -> None:
        self.announced = announced
        self.writer = writer
        self.is_open = False
        self._store = store
        self._digest = hashlib.sha256()

    @property
    def offset(self) -> int:
        return self.writer.bytes

    def close(self) -> None:
        self.is_open = False

    async def write(self, data: bytes) -> None:
        if self.offset + len(data) > self.announced.content.bytes:
            await self._store.drop(self)
            raise BulkRefused(grpc.StatusCode.INVALID_ARGUMENT, "more bytes than were announced")
        self._digest.update(data)
        try:
            await self.writer.write(data)
        except (SQLAlchemyError, OSError) as exc:
            await self._store.drop(self)
            raise BulkRefused(_UNAVAILABLE, f"the database is away: {reason(exc)}") from exc

    async def finish(self) -> None:
        if self._digest.digest() != self.announced.content.sha256:
            await self._store.drop(self)
            raise BulkRefused(grpc.StatusCode.INVALID_ARGUMENT, "the content has another digest")
        try:
            await self._store.finished(self)
        except (SQLAlchemyError, OSError) as exc:
            raise BulkRefused(_UNAVAILABLE, f"the database is away: {reason(exc)}") from exc
