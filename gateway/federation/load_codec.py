"""Validate the load reports of sites and convert them to the gateway's values."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.device import DeviceLoad
from gateway.domain import IterationCost, LoadReport
from gateway.federation.codec import amount, clean_name
from gateway.federation.progress import EngineReport
from wire import federation_pb2 as pb

MAX_DEVICES = 64
"""The limit of devices of one site; further ones are dropped."""


def load(report: pb.Load, received_s: float, quiet_s: float = 0.0) -> LoadReport:
    cost = report.iteration
    return LoadReport(
        seq=report.seq,
        received_s=received_s,
        running=report.running,
        pending=report.pending,
        token_load=amount(report.token_load, "token_load"),
        kv_free_tokens=report.kv_free_tokens,
        kv_reserved_tokens=report.kv_reserved_tokens,
        kv_extra_tokens=report.kv_extra_tokens,
        tokens_per_s=amount(report.tokens_per_s, "tokens_per_s"),
        seconds_per_iteration=amount(report.seconds_per_iteration, "seconds_per_iteration"),
        iteration=IterationCost(
            base_s=amount(cost.base_s, "base_s"),
            per_row_s=amount(cost.per_row_s, "per_row_s"),
            per_token_s=amount(cost.per_token_s, "per_token_s"),
            per_kv_token_s=amount(cost.per_kv_token_s, "per_kv_token_s"),
        ),
        running_remaining=tuple(report.running_remaining[:64]),
        running_weight=max(1, report.running_weight),
        pending_prompt_tokens=report.pending_prompt_tokens,
        pending_response_tokens=amount(report.pending_response_tokens, "pending_response_tokens"),
        tokens_total=report.tokens_total,
        prompt_tokens_total=report.prompt_tokens_total,
        computed_tokens_total=report.computed_tokens_total,
        unread_tokens=report.unread_tokens,
        unknown_messages=report.unknown_messages,
        devices=_devices(report.devices),
        training=report.training,
        training_s_per_iteration=amount(report.training_s_per_iteration, "training_s_per_iteration"),
        quiet_s=quiet_s,
    )


def _devices(found: Sequence[pb.DeviceLoad]) -> tuple[DeviceLoad, ...]:
    """Return the loads of the first MAX_DEVICES devices, without duplicate names."""
    return tuple(
        DeviceLoad(
            device=device,
            lost=each.lost,
            slots=each.slots,
            running=each.running,
            pending=each.pending,
            kv_tokens=each.kv_tokens,
            kv_free_tokens=each.kv_free_tokens,
            tokens_per_s=amount(each.tokens_per_s, "tokens_per_s"),
            moved_in=each.moved_in,
            losses=each.losses,
        )
        for device, each in {clean_name(each.device): each for each in found[:MAX_DEVICES]}.items()
    )


def engine_report(report: pb.Load) -> EngineReport:
    return EngineReport(
        amount(report.stalled_s, "stalled_s"),
        amount(report.longest_iteration_s, "longest_iteration_s"),
        (report.tokens_total, report.prompt_tokens_total, report.unread_tokens),
    )
