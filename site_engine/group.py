"""The models of a native site: a base and its variants, which come and go by configuration and by orders.

Lives on the event loop. Does not load: the engine does, one variant at a time, beside what runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from site_engine.config import MAX_NAME_CHARS, SiteConfig
from site_engine.core.chain import Chain, Variant
from site_engine.errors import VariantRefused
from site_engine.federation.site import Site
from site_engine.messages import Model, ModelOrder
from site_engine.native import NativeEngine

log = logging.getLogger(__name__)

MAX_WAITING_ORDERS = 64


class Group:
    """`wanted` are the variants that the site is to serve, by id. Orders change it, so that what they have
    changed outlives an engine that is lost.
    """

    def __init__(
        self, config: SiteConfig, engine: NativeEngine, site: Site, wanted: dict[str, Variant]
    ) -> None:
        self._engine = engine
        self._site = site
        self._wanted = wanted
        self._folders = tuple(Path(each).resolve() for each in config.models_from)
        (self._base,) = site.hello().models
        self._models: dict[str, Model] = {}
        self._waiting = 0  # orders that the engine carries out
        site.on_order = self.carry_out

    def load_wanted(self) -> None:
        """Load what is wanted, one after the other; each is served as soon as it is certified."""
        for variant in list(self._wanted.values()):
            if variant.id == self._base.id:
                log.error("%s is not served as a variant: it is the base", variant.id)
            else:
                self._engine.add_variant(variant, partial(self._added, variant, lambda _: None))

    def carry_out(self, order: ModelOrder, reply: Callable[[str], None]) -> None:
        """Add or remove a variant; reply with why nothing has changed, or with nothing."""
        try:
            self._carry_out(order, reply)
        except VariantRefused as refused:
            reply(str(refused))

    def _carry_out(self, order: ModelOrder, reply: Callable[[str], None]) -> None:
        if self._waiting >= MAX_WAITING_ORDERS:
            raise VariantRefused(f"{self._waiting} orders wait here already; try again later")
        if order.model == self._base.id:
            raise VariantRefused(f"{order.model} is the base of this group, which is no variant")

        def end(error: str) -> None:
            self._waiting -= 1
            log.info("order to %s %s: %s", order.kind, order.model, error or "done")
            reply(error)

        if order.kind == "add":
            variant = self._checked(order)
            self._waiting += 1
            self._engine.add_variant(variant, partial(self._added, variant, end))
        elif order.kind == "remove":
            self._waiting += 1
            self._engine.remove_variant(order.model, partial(self._removed, order.model, end))
        else:
            raise VariantRefused(f"this site knows no order {order.kind!r}; upgrade it")

    def _checked(self, order: ModelOrder) -> Variant:
        """Return the variant that an order names. Raises VariantRefused."""
        if not 0 < len(order.model) <= MAX_NAME_CHARS or not order.model.isprintable():
            raise VariantRefused(f"an id has 1 to {MAX_NAME_CHARS} printable characters")
        if order.model in self._models:
            raise VariantRefused(f"{order.model} is served here already; remove it first")
        if bool(order.adapter) == bool(order.folder):
            raise VariantRefused("an order names one folder: of an adapter or of a model")
        try:
            path = Path(order.adapter or order.folder).resolve()
            is_folder = path.is_dir()
        except (OSError, ValueError, RuntimeError) as exc:  # a NUL, a loop of links, a name of megabytes
            shown = (order.adapter or order.folder)[:MAX_NAME_CHARS]
            raise VariantRefused(f"{shown!r} is no folder of this site: {type(exc).__name__}") from exc
        if not any(path.is_relative_to(folder) for folder in self._folders):
            allowed = ", ".join(map(str, self._folders)) or "nothing"
            raise VariantRefused(f"{path} is not below models_from of this site, which is {allowed}")
        if not is_folder:
            raise VariantRefused(f"there is no folder {path} at this site")
        given = str(path)
        return Variant(order.model, given if order.adapter else "", given if order.folder else "")

    def _added(self, variant: Variant, end: Callable[[str], None], answer: Chain | VariantRefused) -> None:
        if isinstance(answer, VariantRefused):
            log.error("%s is not served: %s", variant.id, answer)
            end(str(answer))
            return
        self._wanted[variant.id] = variant
        self._models[variant.id] = replace(
            self._base,
            id=variant.id,
            revision=f"{self._base.revision}+{answer.fingerprint}",  # which names what is its own alone
            created_s=int(time.time()),
            parent=self._base.id,
            own_bytes=answer.own_bytes,
        )
        self._announce()
        end("")

    def _removed(self, variant_id: str, end: Callable[[str], None], answer: VariantRefused | None) -> None:
        if answer is not None:
            end(str(answer))
            return
        self._wanted.pop(variant_id, None)
        self._models.pop(variant_id, None)
        self._announce()
        end("")

    def _announce(self) -> None:
        self._site.set_models((self._base, *self._models.values()))
