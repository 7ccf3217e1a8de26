"""The kinds of slices that a micro-batch and a step of the optimizer consist of, whose times are unlike."""

from __future__ import annotations

from enum import StrEnum


class Slice(StrEnum):
    """A fused layer's backward pass has three slices of similar length, any other layer's one, BACKWARD."""

    BEGIN = "begin"
    FORWARD = "forward"
    HEAD = "head"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"  # if fused, down to the gates
    GATE_UP_BACKWARD = "gate_up_backward"
    ATTENTION_BACKWARD = "attention_backward"
    UPDATE = "update"


BACKWARD_SLICES = Slice.BACKWARD, Slice.GATE_UP_BACKWARD, Slice.ATTENTION_BACKWARD
LAYER_SLICES = Slice.FORWARD, Slice.RECOMPUTE, *BACKWARD_SLICES
