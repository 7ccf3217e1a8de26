"""What operators see of everyone's batches: how far each is, whose it is and which replica runs it."""

from __future__ import annotations

from typing import Any

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.batches.ledger import Ledger
from gateway.batches.values import Batch
from gateway.http.batches import LIST_DEFAULT, LIST_MOST, shape
from gateway.http.files import answering, listing, page_of


def batch_reads(access: Access, ledger: Ledger) -> list[HTTPRouteHandler]:
    @get("/admin/api/batches")
    async def batches(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        page = page_of(request, LIST_DEFAULT, LIST_MOST)
        with answering(page):
            found = await ledger.listed(None, page)
        return listing([_for_operators(batch) for batch in found], page)

    return [batches]


def _for_operators(batch: Batch) -> dict[str, Any]:
    return {**shape(batch), "tenant": batch.tenant, "key_id": batch.key_id, "leased_by": batch.leased_by}
