"""Check that operators' orders load variants only from where `models_from` of a site allows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from site_engine.config import HUB, MAX_NAME_CHARS
from site_engine.core.chain import Variant
from site_engine.errors import VariantRefused
from site_engine.messages import ModelOrder


class VariantSources:
    """`models_from`: full paths of folders, and names of the Hub; one that ends in / is a prefix of names."""

    def __init__(self, models_from: Sequence[str]) -> None:
        self._hub = tuple(each for each in models_from if each.startswith(HUB))
        self._folders = tuple(Path(each).resolve() for each in models_from if each not in self._hub)

    def variant_of(self, order: ModelOrder) -> Variant:
        """Return the variant of a folder that an order names. Raises VariantRefused."""
        if bool(order.adapter) == bool(order.folder):
            raise VariantRefused("an order names one folder: of an adapter or of a model")
        source = order.adapter or order.folder
        if source.startswith(HUB):
            self._check_repository(source)
            return Variant(order.model, order.adapter, order.folder)
        given = str(self._checked_folder(source))
        return Variant(order.model, given if order.adapter else "", given if order.folder else "")

    def _check_repository(self, source: str) -> None:
        repository = source.partition("@")[0]
        if not any(
            repository == each or (each.endswith("/") and repository.startswith(each)) for each in self._hub
        ):
            names = ", ".join(self._hub) or "none of the Hub"
            raise VariantRefused(
                f"{source[:MAX_NAME_CHARS]} is not of models_from of this site, which has {names}"
            )

    def _checked_folder(self, source: str) -> Path:
        try:
            path = Path(source).resolve()
            is_folder = path.is_dir()
        except (OSError, ValueError, RuntimeError) as exc:  # a NUL, a loop of links, a name of megabytes
            raise VariantRefused(
                f"{source[:MAX_NAME_CHARS]!r} is no folder of this site: {type(exc).__name__}"
            ) from exc
        if not any(path.is_relative_to(folder) for folder in self._folders):
            allowed = ", ".join(map(str, self._folders)) or "nothing"
            raise VariantRefused(f"{path} is not below models_from of this site, which is {allowed}")
        if not is_folder:
            raise VariantRefused(f"there is no folder {path} at this site")
        return path
