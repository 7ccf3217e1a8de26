"""The models of a native site: a base and its variants. Configuration and orders add and remove variants;
models that sleep are loaded when a query asks for them.

Runs on the event loop. Does not load variants: the engine does, one at a time, while it serves.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

from site_engine.config import MAX_NAME_CHARS, SiteConfig
from site_engine.core.chain import Chain, Variant
from site_engine.core.training import Content
from site_engine.engine_client import LoadSeen
from site_engine.errors import TransferFailed, VariantRefused
from site_engine.federation.site import Site
from site_engine.federation.training import answer
from site_engine.messages import Model, ModelOrder, ModelState
from site_engine.native import NativeEngine
from site_engine.variants.sources import VariantSources

log = logging.getLogger(__name__)

MAX_WAITING_ORDERS = 64
MAX_MODELS = 8_192
"""Maximum number of variants of a group, awake or asleep. Gateways accept 10,000 models of a site."""
RESIDENTS_EVERY_S = 2.0
MODELS_PER_S = 100
"""What bounds the announcements of which adapters are in slots: all models are told each time."""
CHANGING = "another order for {} is being carried out; try again later"

Reply: TypeAlias = Callable[[str], None]
"""Called with the reason for a refusal, or with an empty string on success."""


def _ignore(_reason: str) -> None:
    """Ignore the result of a change that nobody ordered."""


class Tuning(NamedTuple):
    """The source of tenants' adapters: `fetch` returns an archive, `unpack` writes it below `folder`.

    They raise TransferFailed and VariantRefused.
    """

    fetch: Callable[[Content], Awaitable[bytes]]
    unpack: Callable[[bytes, Path], Path]
    folder: Path


class Wanted(NamedTuple):
    """A variant that the site is to serve. `asleep`: as it is announced while it sleeps, else None."""

    variant: Variant
    asleep: Model | None = None


class Group:
    """`wanted` are the variants that the site is to serve, by id. Orders change it, so that what they have
    changed outlives an engine that is lost.

    For the engine, a sleeping variant is removed, and waking adds it again with the same contents, checked by
    hash.
    """

    def __init__(
        self, config: SiteConfig, engine: NativeEngine, site: Site, wanted: dict[str, Wanted]
    ) -> None:
        self._engine = engine
        self._site = site
        self._wanted = wanted
        self._sources = VariantSources(config.models_from)
        (self._base,) = site.hello().models
        self._base_waking: list[Reply] = []  # orders that wait for the base to be awake
        self._after_base: dict[str, list[Reply]] = {}  # by variant: what is to wake once the base is awake
        self._models: dict[str, Model] = {}
        self._waiting = 0  # orders that the engine carries out
        self._loading = 0  # new variants that the engine loads
        self._leaving: set[str] = set()  # variants that the engine is removing
        self._waking: dict[str, list[Reply]] = {}  # by variant: orders that wait for it to be awake
        self.tuning: Tuning | None = None  # of a site that trains
        self._adding: set[asyncio.Task[None]] = set()
        self._resident: frozenset[str] = frozenset()  # fingerprints of the adapters in slots
        self._announcing: asyncio.TimerHandle | None = None
        site.on_order = self.carry_out
        site.held.wake = self.wake

    def load_wanted(self) -> None:
        """Load the wanted variants one after another. Each is served as soon as it is certified."""
        for variant, asleep in list(self._wanted.values()):
            if variant.tenant:  # its folder went with the engine before: a gateway has it fetched anew
                del self._wanted[variant.id]
            elif variant.id == self._base.id:
                log.error("%s is not served as a variant: it is the base", variant.id)
            elif asleep is not None:
                self._models[variant.id] = asleep
            else:
                self.add(variant._replace(fingerprint=""), _ignore)
        if self._models:
            self._announce()

    def load(self, seen: LoadSeen) -> None:
        """Handle the engine's load figures. Gateways display which adapters are in slots."""
        if seen.figures.resident == self._resident:
            return
        self._resident = seen.figures.resident
        if self._announcing is None:
            within_s = max(RESIDENTS_EVERY_S, len(self._models) / MODELS_PER_S)
            self._announcing = asyncio.get_running_loop().call_later(within_s, self._announce)

    def carry_out(self, order: ModelOrder, reply: Reply) -> None:
        """Add or remove a variant, put it to sleep or wake it. Calls `reply` with the reason of a refusal."""
        try:
            self._carry_out(order, reply)
        except VariantRefused as refused:
            reply(str(refused))

    def _carry_out(self, order: ModelOrder, reply: Reply) -> None:
        if self._waiting >= MAX_WAITING_ORDERS:
            raise VariantRefused(f"{self._waiting} orders wait here already; try again later")
        if order.model == self._base.id and order.kind not in {"sleep", "wake"}:
            raise VariantRefused(f"{order.model} is the base of this group, which is no variant")
        if self._base.state is not ModelState.READY and order.kind in {"add", "remove"}:
            raise VariantRefused(f"{self._base.id} sleeps here, and its variants with it; wake it first")
        of_served = {"remove": self.remove, "sleep": self.sleep, "wake": self.wake}
        if order.kind == "add":
            self._check_new(order.model)
            act = self._addition(order)
        elif order.kind not in of_served:
            raise VariantRefused(f"this site knows no order {order.kind!r}; upgrade it")
        elif order.model not in self._models and order.model != self._base.id:
            raise VariantRefused(f"{order.model} is not served here")
        else:
            act = partial(of_served[order.kind], order.model)

        def end(error: str) -> None:
            self._waiting -= 1
            log.info("order to %s %s: %s", order.kind, order.model, error or "done")
            reply(error)

        self._waiting += 1
        act(end)

    def add(self, variant: Variant, reply: Reply) -> None:
        """Load a variant and serve it."""
        self._loading += 1
        self._engine.add_variant(variant, partial(self._added, variant, time.monotonic(), reply))

    def remove(self, variant_id: str, reply: Reply) -> None:
        """Stop serving a variant. Its running requests finish."""
        if variant_id in self._leaving or variant_id in self._waking:
            reply(CHANGING.format(variant_id))
        elif self._models[variant_id].state is ModelState.SLEEPING:
            self._removed(variant_id, reply, None)
        else:
            self._leaving.add(variant_id)
            self._engine.remove_variant(variant_id, partial(self._removed, variant_id, reply))

    def sleep(self, variant_id: str, reply: Reply) -> None:
        """Free the memory of a variant once its running requests have finished."""
        if variant_id == self._base.id:
            self._sleep_base(reply)
            return
        if self._base.state is not ModelState.READY:
            reply(f"{self._base.id} sleeps here, and its variants with it; wake it first")
            return
        model = self._models[variant_id]
        if variant_id in self._leaving or variant_id in self._waking:
            reply(CHANGING.format(variant_id))
        elif model.state is ModelState.SLEEPING:
            reply("")
        else:
            self._leaving.add(variant_id)
            self._set(replace(model, state=ModelState.SLEEPING))  # so that the engine gets no more of it
            self._engine.remove_variant(variant_id, partial(self._slept, model, reply))

    def _slept(self, model: Model, end: Reply, answer: VariantRefused | None) -> None:
        self._leaving.remove(model.id)
        if answer is not None:
            self._set(model)
            for reply in (end, *self._waking.pop(model.id, ())):
                reply(str(answer))
            return
        variant, _ = self._wanted[model.id]
        self._wanted[model.id] = Wanted(variant, self._models[model.id])
        end("")
        if model.id in self._waking:
            self._load(model.id)

    def wake(self, variant_id: str, reply: Reply = _ignore) -> None:
        """Load a sleeping variant, after its base. Calls `reply` when it is awake, or with the reason why
        not.
        """
        if variant_id == self._base.id:
            self._wake_base(reply)
        elif self._base.state is not ModelState.READY:
            self._after_base.setdefault(variant_id, []).append(reply)
            self._wake_base()
        elif variant_id not in self._models:  # the engines have dropped it while they woke
            reply(f"{variant_id} is not served here any more")
        elif self._models[variant_id].state is ModelState.READY:
            reply("")
        elif variant_id in self._waking:
            self._waking[variant_id].append(reply)
        else:
            self._waking[variant_id] = [reply]
            if variant_id not in self._leaving:  # else it is loaded once it sleeps
                self._load(variant_id)

    def _load(self, variant_id: str) -> None:
        self._set(replace(self._models[variant_id], state=ModelState.WAKING))
        variant = self._wanted[variant_id].variant
        self._engine.add_variant(variant, partial(self._woken, variant, time.monotonic()))

    def _woken(self, variant: Variant, began_s: float, answer: Chain | VariantRefused) -> None:
        waiting, model = self._waking.pop(variant.id), self._models[variant.id]
        error = ""
        if isinstance(answer, VariantRefused):
            error = str(answer)
            log.error("%s cannot be woken: %s", variant.id, error)
            self._set(replace(model, state=ModelState.SLEEPING))
            self._site.held.refuse(variant.id, error)
        else:
            self._wanted[variant.id] = Wanted(variant)
            self._set(replace(model, state=ModelState.READY, wake_s=time.monotonic() - began_s))
        for reply in waiting:
            reply(error)

    def refused(self, variant_id: str, refusal: VariantRefused) -> None:
        """Mark a variant as asleep that the engines have dropped. The next query loads it again, or gets the
        reason why not. A tenant's variant is removed instead, because a gateway fetches it again.
        """
        if variant_id not in self._models or variant_id in self._leaving:
            return
        log.error("%s is served no more: %s", variant_id, refusal)
        variant, model = self._wanted[variant_id].variant, self._models[variant_id]
        if variant.tenant:
            self._removed(variant_id, _ignore, None)
        else:
            model = replace(model, state=ModelState.SLEEPING)
            self._wanted[variant_id] = Wanted(variant, model)
            self._set(model)

    def _sleep_base(self, reply: Reply) -> None:
        """Put the base and all variants to sleep. The engines then hold no device memory."""
        sleeping = self._engine.sleeping
        if sleeping is None:
            reply("the base sleeps only where `devices` names its devices: its engines' processes end then")
        elif self._base.state is ModelState.SLEEPING:
            reply("")
        elif self._base.state is ModelState.WAKING or self._leaving or self._waking or self._loading:
            reply(CHANGING.format(self._base.id))
        elif sleeping.trains():
            reply("an adapter is trained here; let the base sleep when that has ended")
        else:
            self._set_base(ModelState.SLEEPING)
            sleeping.sleep(reply)

    def _wake_base(self, reply: Reply = _ignore) -> None:
        sleeping = self._engine.sleeping
        if sleeping is None or self._base.state is ModelState.READY:
            reply("")
            return
        self._base_waking.append(reply)
        if self._base.state is ModelState.SLEEPING:
            self._set_base(ModelState.WAKING)
            sleeping.wake(partial(self._base_woken, time.monotonic()))

    def _base_woken(self, began_s: float, error: str) -> None:
        waiting, self._base_waking = self._base_waking, []
        variants, self._after_base = self._after_base, {}
        if error:
            log.error("%s cannot be woken: %s", self._base.id, error)
            self._set_base(ModelState.SLEEPING)
            for model_id in (self._base.id, *self._models):
                self._site.held.refuse(model_id, error)
            for reply in chain(waiting, *variants.values()):
                reply(error)
            return
        self._base = replace(self._base, wake_s=time.monotonic() - began_s)
        self._set_base(ModelState.READY)
        for reply in waiting:
            reply("")
        for variant_id, replies in variants.items():
            for reply in replies:
                self.wake(variant_id, reply)

    def _set_base(self, state: ModelState) -> None:
        self._base = replace(self._base, state=state)
        self._announce()

    def _set(self, model: Model) -> None:
        self._models[model.id] = model
        self._announce()

    async def serve_adapter(self, variant_id: str, tenant: str, archive: bytes) -> str:
        """Serve an adapter to one tenant, replacing one of the same name. Return the reason of a refusal, or
        "".
        """
        assert self.tuning is not None
        try:
            if variant_id in self._models:
                left: str = await answer(partial(self.remove, variant_id))
                if left:
                    return left
            self._check_new(variant_id)
            folder = await asyncio.to_thread(self.tuning.unpack, archive, self.tuning.folder)
        except (VariantRefused, OSError) as exc:
            return str(exc)
        error: str = await answer(partial(self.add, Variant(variant_id, str(folder), tenant=tenant)))
        if error:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return error

    def _addition(self, order: ModelOrder) -> Callable[[Reply], None]:
        """Return the function that adds the variant of an order. Raises VariantRefused."""
        if order.content is None:
            return partial(self.add, self._sources.variant_of(order))
        tuning, content = self.tuning, order.content
        if tuning is None:
            raise VariantRefused("this site does not train, and fetches no adapters")
        if order.parent != self._base.id or not order.tenant:
            raise VariantRefused(f"an adapter of {order.parent!r} is of no use beside {self._base.id}")

        async def fetch_and_serve(reply: Reply) -> None:
            try:
                archive = await tuning.fetch(content)
                self._check_new(order.model)  # which another gateway has ordered, or a run made, meanwhile
                error = await self.serve_adapter(order.model, order.tenant, archive)
            except (TransferFailed, VariantRefused) as exc:
                error = str(exc)
            reply(error)

        def begin(reply: Reply) -> None:
            task = asyncio.create_task(fetch_and_serve(reply), name=f"fetch {order.model}")
            self._adding.add(task)
            task.add_done_callback(self._adding.discard)

        return begin

    def _check_new(self, variant_id: str) -> None:
        """Raise VariantRefused if the id is invalid or taken, or if there are too many variants."""
        if not 0 < len(variant_id) <= MAX_NAME_CHARS or not variant_id.isprintable():
            raise VariantRefused(f"an id has 1 to {MAX_NAME_CHARS} printable characters")
        if variant_id in self._models:
            raise VariantRefused(f"{variant_id} is served here already; remove it first")
        if len(self._models) >= MAX_MODELS:
            raise VariantRefused(f"{MAX_MODELS:,} variants are here, which is the limit; remove one first")

    def _added(self, variant: Variant, began_s: float, end: Reply, answer: Chain | VariantRefused) -> None:
        self._loading -= 1
        if isinstance(answer, VariantRefused):
            log.error("%s is not served: %s", variant.id, answer)
            end(str(answer))
            return
        self._wanted[variant.id] = Wanted(variant._replace(fingerprint=answer.fingerprint))
        self._set(
            replace(
                self._base,
                id=variant.id,
                revision=f"{self._base.revision}+{answer.fingerprint}",  # which names what is its own alone
                created_s=int(time.time()),
                parent=self._base.id,
                own_bytes=answer.own_bytes,
                blocks=answer.blocks,
                wake_s=time.monotonic() - began_s,
                tenant=variant.tenant,
            )
        )
        end("")

    def _removed(self, variant_id: str, end: Reply, answer: VariantRefused | None) -> None:
        self._leaving.discard(variant_id)
        if answer is not None:
            end(str(answer))
            return
        wanted = self._wanted.pop(variant_id, None)
        self._models.pop(variant_id, None)
        if wanted is not None and wanted.variant.tenant:  # its folder was made for it
            asyncio.get_running_loop().run_in_executor(
                None, partial(shutil.rmtree, wanted.variant.adapter, ignore_errors=True)
            )
        self._announce()
        end("")

    def _announce(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
            self._announcing = None
        base, models = self._base, tuple(map(self._placed, self._models.values()))
        if base.state is not ModelState.READY:
            models = tuple(
                replace(each, state=base.state, wake_s=each.wake_s + base.wake_s)
                if each.state is ModelState.READY
                else each
                for each in models
            )
        self._site.set_models((base, *models))

    def _placed(self, model: Model) -> Model:
        """Return the model. While its adapter has a slot, its blocks do not count as `in_host`."""
        if self._wanted[model.id].variant.fingerprint not in self._resident:
            return model
        return replace(model, blocks=tuple(each._replace(in_host=False) for each in model.blocks))
