"""One site process: the model and its engine thread, the tokenizer thread, the links, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import grpc

from site_engine import logs
from site_engine.config import SiteConfig
from site_engine.desk import Tell
from site_engine.errors import ConfigError
from site_engine.identity import Asking, Identity
from site_engine.link import Link, Links, Patience, dial, is_loopback
from site_engine.messages import Hello, Model
from site_engine.prompts import Prompts
from site_engine.site import Site
from site_engine.telling import telling
from site_engine.worker import Engine, Listener, Worker

if TYPE_CHECKING:
    from site_engine.grammar import Grammars

log = logging.getLogger(__name__)

TICK_S = 0.25
EXIT_OK, EXIT_FAILED = 0, 1


class Loaded(NamedTuple):
    """What takes long to make: an engine with its model, and what has to be known of them."""

    engine: Engine
    tokenizer: Any
    name: str
    revision: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


def run(config: SiteConfig) -> int:
    """Serves until a signal; the exit status of the process."""
    logs.set_up(config.log_level, config.site)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config) if config.engine == "native" else _serve_remote(config))
    except ConfigError as exc:
        log.critical("%s", exc)
        return EXIT_FAILED


async def serve(config: SiteConfig, load: Callable[[SiteConfig], Loaded] | None = None) -> int:
    """Loads the model, links to the gateways, serves, drains. Raises ConfigError if it cannot begin.

    The first SIGTERM or SIGINT drains; the second ends without waiting.
    """
    dialling = Dialling.of(config)
    loaded = await asyncio.to_thread(load or load_engine, config)
    async with telling(config) as tell:
        return await _serve(config, loaded, dialling, tell)


async def _serve(config: SiteConfig, loaded: Loaded, dialling: Dialling, tell: Tell) -> int:
    loop = asyncio.get_running_loop()
    grammars = await asyncio.to_thread(_grammars, loaded)
    prompts = Prompts(loaded.tokenizer, loaded.vocab_size, loop.call_soon_threadsafe, grammars)
    worker = Worker(loaded.engine, loop.call_soon_threadsafe, time.monotonic, config.iteration_floor_s)
    site = Site(
        _hello(config, loaded, prompts), worker, prompts, time.monotonic, config.max_pending, tell=tell
    )
    links = dialling.links(site)
    ending = Ending()
    ticking = asyncio.create_task(tick(site))
    worker.start(Listener(site.outputs, site.load, ending.broke))
    try:
        with ending.on_signals(loop):
            links.add(config.gateways)
            log.info("serving %s in %d slots", ", ".join(site.models), config.slots)
            return await until_the_end(site, links, ending, config.drain_s)
    finally:
        ticking.cancel()
        await links.close("the site is ending")
        prompts.close()
        await asyncio.to_thread(worker.stop)


class Ending:
    """Why and how fast the process is to end."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.hurried = asyncio.Event()
        self.reason = ""
        self.status = EXIT_OK

    def broke(self, reason: str) -> None:
        self.status = EXIT_FAILED
        self.reason = f"the engine is broken: {reason}"
        self.hurried.set()
        self.began.set()

    def signalled(self, number: signal.Signals) -> None:
        if self.began.is_set():
            self.status = self.status or 128 + number
            self.hurried.set()
        else:
            self.reason = f"the site is ending ({number.name})"
            self.began.set()

    @contextmanager
    def on_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Only the main thread of a process hears signals; elsewhere nothing is installed."""
        heard = (
            (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        )
        for number in heard:
            loop.add_signal_handler(number, self.signalled, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)


async def until_the_end(site: Site, links: Links, ending: Ending, drain_s: float) -> int:
    await ending.began.wait()
    if not ending.hurried.is_set():
        log.info("draining: %s; %d attempts still run", ending.reason, site.live)
        site.drain(ending.reason, drain_s)
        await _drained(site, ending, drain_s)
    log.info("ending with %d attempts left", site.live)
    await links.close(ending.reason)
    return ending.status


async def _serve_remote(config: SiteConfig) -> int:
    from site_engine.remote.process import serve as serve_remote

    return await serve_remote(config)


async def _drained(site: Site, ending: Ending, drain_s: float) -> None:
    """Until nothing runs, the time is up, or somebody is in a hurry."""
    idle = asyncio.Event()
    site.when_idle(idle.set)
    waiting = [asyncio.create_task(event.wait()) for event in (idle, ending.hurried)]
    await asyncio.wait(waiting, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def tick(site: Site) -> None:
    while True:
        site.tick()
        await asyncio.sleep(TICK_S)


def load_engine(config: SiteConfig) -> Loaded:
    """The native engine with the model of `config`. Raises ConfigError that says why it cannot be served."""
    import torch
    from transformers.utils import logging as chatter

    from site_engine import hf_bridge
    from site_engine.engine import EngineSettings, SiteEngine
    from site_engine.warmup import warm_up

    chatter.disable_progress_bar()
    chatter.disable_default_handler()  # its lines become ours
    chatter.enable_propagation()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {config.device}, but torch finds no GPU here")
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())
    device = ("cuda" if on_gpu else "cpu") if config.device == "auto" else config.device
    dtype = ("bfloat16" if on_gpu else "float32") if config.dtype == "auto" else config.dtype
    settings = EngineSettings(
        slots=config.slots,
        token_budget=config.token_budget,
        page_size=config.page_size,
        kv_tokens=config.kv_tokens,
        max_pending=config.max_pending,
        share_prefixes=config.share_prefixes,
        iteration_floor_s=config.iteration_floor_s,
    )
    try:
        model = hf_bridge.load(config.model, device=device, dtype=dtype)
        engine: SiteEngine
        if model.device.type == "cuda":
            from site_engine.cuda.engine import engine_on_gpu  # needs Triton, which not every platform has

            engine = engine_on_gpu(model, settings, time.monotonic)
        else:
            engine = SiteEngine(model, settings, time.monotonic)
        warm_up(engine, model.vocab_size, min(model.context_tokens, engine.load().kv_free_tokens))
    except (hf_bridge.CannotServe, ImportError, ValueError, RuntimeError) as exc:
        raise ConfigError(f"model {config.model!r} cannot be served: {exc}") from exc
    return Loaded(
        engine,
        model.tokenizer,
        model.name,
        model.revision,
        model.context_tokens,
        model.vocab_size,
        model.eos_token_ids,
    )


def _grammars(loaded: Loaded) -> Grammars | None:
    """None, and a warning, where answers can't be held to a grammar: queries that ask for it are refused."""
    from site_engine.grammar import Grammars, NoGrammars

    try:
        return Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
    except NoGrammars as exc:
        log.warning("no JSON schemas and no forced calls of functions with this model: %s", exc)
        return None


def _hello(config: SiteConfig, loaded: Loaded, prompts: Prompts) -> Hello:
    kv_tokens = loaded.engine.load().kv_free_tokens  # nothing runs yet: all there is
    model = Model(
        id=config.served_model or loaded.name,
        revision=loaded.revision,
        context_tokens=min(loaded.context_tokens, kv_tokens),
        created_s=int(time.time()),
        features=prompts.features,
    )
    return Hello(
        site=config.site,
        boot_id=uuid4().hex,
        cloud=config.cloud,
        region=config.region,
        pool=config.pool,
        models=(model,),
        slots=config.slots,
        kv_capacity_tokens=kv_tokens,
        input_usd_per_mtok=config.input_usd_per_mtok,
        output_usd_per_mtok=config.output_usd_per_mtok,
        version=own_version(),
    )


class Dialling(NamedTuple):
    """What every link of this process needs. `identity`: of a site that gets its certificates itself."""

    token: str
    credentials: Callable[[], Any]
    identity: Identity | None

    @classmethod
    def of(cls, config: SiteConfig) -> Dialling:
        """Raises ConfigError. Warns of links that anybody on the way can read."""
        identity = identity_of(config)
        fixed = _credentials(config)
        dialling = cls(config.secret(), identity.credentials if identity else lambda: fixed, identity)
        open_links = [] if config.tls else [each for each in config.gateways if not is_loopback(each)]
        if open_links:
            log.warning("links to %s are plain text, the token too; set tls", ", ".join(open_links))
        return dialling

    def links(self, site: Site) -> Links:
        patience = Patience()

        def make(address: str, peers: Callable[[Iterable[str]], None]) -> Link:
            return Link(
                address,
                site=site,
                dial=lambda where: dial(where, self.credentials()),
                token=self.token,
                peers=peers,
                clock=time.monotonic,
                patience=patience,
                random=Random(),
                refused=self.identity.refused if self.identity else lambda: None,
            )

        return Links(make, patience, beside=self.identity.keep if self.identity else None)


def identity_of(config: SiteConfig) -> Identity | None:
    """Raises ConfigError."""
    if config.identity is None:
        return None
    ca = None if config.tls_ca is None else _bytes(config.tls_ca)
    asking = Asking(config.site, config.enrol_at, config.invitation(), config.gateways, ca)
    return Identity(config.identity, asking, dial)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise ConfigError(f"tls: {exc}") from exc


def _credentials(config: SiteConfig) -> Any:
    if not config.tls:
        return None
    paths = (config.tls_ca, config.tls_key, config.tls_cert)
    ca, key, cert = (_bytes(path) if path else None for path in paths)
    return grpc.ssl_channel_credentials(ca, key, cert)


def own_version() -> str:
    try:
        return version("mico")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
