"""Choose the fastest exact forward pass of a model on a GPU."""

from __future__ import annotations

from site_engine.cuda.compile import QUERY_KEY_VALUE, compile_ends, compile_layers, join
from site_engine.cuda.llama_forward import llama_forward
from site_engine.errors import ModelNotSupported
from site_engine.model.loader import LoadedModel
from site_engine.model.runner import Forward


def fast_forward(model: LoadedModel) -> Forward:
    """Return a pass of few kernels: fused layers for the Llama family, compiled layers for other models.

    Joins and compiles the model's own modules in place. Raises ModelNotSupported for a model that is split
    over a tensor group and whose layers cannot be fused.
    """
    fused = llama_forward(model)
    if fused is not None:
        return fused
    if model.group is not None:
        raise ModelNotSupported(f"this {type(model.model).__name__} cannot be split over several devices")
    if model.device.type == "cuda":
        join(model.model, QUERY_KEY_VALUE)
    compile_layers(model.model)
    compile_ends(model.model)
    return model.forward
