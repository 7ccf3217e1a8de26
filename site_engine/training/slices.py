"""The kinds of slices in a micro-batch and an optimizer step. Their durations differ by kind."""

from __future__ import annotations

from enum import StrEnum


class Slice(StrEnum):
    """The kind of a slice.

    The backward pass of a fused layer has three slices of similar duration; that of any other layer has one,
    BACKWARD.
    """

    BEGIN = "begin"
    FORWARD = "forward"
    HEAD = "head"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"  # if fused, up to and including the down projection
    GATE_UP_BACKWARD = "gate_up_backward"
    ATTENTION_BACKWARD = "attention_backward"
    UPDATE = "update"


BACKWARD_SLICES = Slice.BACKWARD, Slice.GATE_UP_BACKWARD, Slice.ATTENTION_BACKWARD
LAYER_SLICES = Slice.FORWARD, Slice.RECOMPUTE, *BACKWARD_SLICES
