"""The variants of an engine that serves its base alone: none, and no reason to wait for any."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from site_engine.core.chain import Chain, Variant
from site_engine.errors import VariantRefused
from site_engine.variants.changes import LoadedVariant


class BaseAlone:
    """Refuses what `VariantStore` takes."""

    slots = None

    @property
    def served(self) -> Mapping[str, LoadedVariant]:
        return {}

    def load(self, variant: Variant) -> Callable[[], Chain]:
        raise VariantRefused(
            f"{variant.id}: this engine serves its base alone; on a GPU it needs adapter_slots, "
            "and a model of the Llama family"
        )

    def remove(self, variant_id: str) -> None:
        raise VariantRefused(f"{variant_id} is not served here")
