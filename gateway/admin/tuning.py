"""List all tenants' fine-tuning jobs for operators, with the progress, tenant and losses of each."""

from __future__ import annotations

from typing import Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access, AnyRequest
from gateway.http.backend import Backend
from gateway.http.error_handler import database_errors
from gateway.http.fine_tuning import DEFAULT_PAGE, MAX_PAGE, job_json
from gateway.http.pagination import list_response, read_page
from gateway.tuning.service import TuningService

LOSSES: Final = 90
"""Losses per job: more would be closer together than the width of the plotted line."""


def tuning_reads(access: Access, backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    @get("/admin/api/fine_tuning")
    async def jobs(request: AnyRequest) -> Response[bytes]:
        await access.operator(request)
        page, now_s = read_page(request, DEFAULT_PAGE, MAX_PAGE), backend.unix_time()
        with database_errors(page):
            found = await tuning.ledger.list_page(None, page)
            losses = [await tuning.events.list_losses(job.id, LOSSES) for job in found]
        return list_response(
            [
                {
                    **job_json(job, now_s),
                    "tenant": job.tenant,
                    "key_id": job.key_id,
                    "leased_by": job.leased_by,
                    "losses": [[each["step"], each["train_loss"], each.get("valid_loss")] for each in steps],
                }
                for job, steps in zip(found, losses, strict=True)
            ],
            page,
        )

    return [jobs]
