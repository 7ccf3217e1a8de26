"""List all tenants' batches for operators, with the progress, the tenant and the replica that runs each."""

from __future__ import annotations

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.batches.ledger import Ledger
from gateway.http.batches import DEFAULT_PAGE, MAX_PAGE, batch_json
from gateway.http.error_handler import database_errors
from gateway.http.pagination import list_response, read_page


def batch_reads(access: Access, ledger: Ledger) -> list[HTTPRouteHandler]:
    @get("/admin/api/batches")
    async def batches(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        page = read_page(request, DEFAULT_PAGE, MAX_PAGE)
        with database_errors(page):
            found = await ledger.list_page(None, page)
        return list_response(
            [
                {
                    **batch_json(batch),
                    "tenant": batch.tenant,
                    "key_id": batch.key_id,
                    "leased_by": batch.leased_by,
                }
                for batch in found
            ],
            page,
        )

    return [batches]
