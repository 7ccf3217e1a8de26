"""Many sites in one process, for bench.fleet: the real link of a site, before an engine without a model.

    python -m bench.support.fleet_sites --join 127.0.0.1:50051 --sites 200

Again and again it prints how many of the streams of its sites are up, and how many reports they have made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from random import Random

from site_engine.core.load import IterationCost, LoadFigures, condense
from site_engine.core.request import Finish, Output
from site_engine.engine_client import Group, Listener, LoadSeen, Prepared
from site_engine.errors import NotServed
from site_engine.federation.link import Link, Links, LinkTimeouts, open_channel
from site_engine.federation.site import Site
from site_engine.messages import Assign, Hello, Model
from tests.support.scripted_upstream import MODEL, PROMPT_TOKENS, words
from tests.support.stand_in_site import TOKEN

SLOTS, KV_TOKENS = 64, 400_000
TICK_S = 0.25
"""As in site_engine/shutdown.py."""
REPORT_S = 0.05
"""As the engine's thread reports while it works."""
COST = IterationCost(0.015, 5e-5, 2e-5, 1e-8)
MEAN_RESPONSE, MEAN_PROMPT = 200.0, 500


class OwnWork:
    """Requests that other gateways are taken to have assigned: they come at random and end when due.

    Each runs for its tokens at `SECONDS_PER_TOKEN`.
    """

    SECONDS_PER_TOKEN = COST.base_s + SLOTS / 2 * COST.per_row_s

    def __init__(self, share: float, random: Random, now_s: float) -> None:
        """`share`: the mean share of the slots that are taken, which sets the rate of arrivals."""
        self._rate_per_s = share * SLOTS / (MEAN_RESPONSE * self.SECONDS_PER_TOKEN)
        self._random = random
        self._ends_s: list[float] = []
        self._next_s = now_s
        self._seen_s = now_s
        self.tokens_total = 0.0

    def remaining(self, now_s: float) -> list[float]:
        """Return the tokens that each running request has left."""
        while self._next_s <= now_s:
            tokens = self._random.expovariate(1 / MEAN_RESPONSE)
            heappush(self._ends_s, self._next_s + tokens * self.SECONDS_PER_TOKEN)
            self._next_s += self._random.expovariate(self._rate_per_s)
        while self._ends_s and self._ends_s[0] <= now_s:
            heappop(self._ends_s)
        self.tokens_total += len(self._ends_s) * (now_s - self._seen_s) / self.SECONDS_PER_TOKEN
        self._seen_s = now_s
        return [1 + (end_s - now_s) / self.SECONDS_PER_TOKEN for end_s in self._ends_s[:SLOTS]]


class StandInEngine:
    """Answers each request with the words of the scripted upstream, one each `token_s`."""

    waiting = 0

    def __init__(self, tokens: int, token_s: float, own: OwnWork | None) -> None:
        self._words = words(tokens)
        self._token_s = token_s
        self._own = own
        self._live: dict[str, int] = {}
        self._listener: Listener | None = None
        self._tokens_total = 0

    def start(self, listener: Listener) -> None:
        self._listener = listener
        if self._own is not None:
            self._report_again()

    def waiting_of(self, tenant: str) -> int:
        return 0

    def stalled_s(self) -> float:
        return 0.0

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        reply(Prepared((0,) * PROMPT_TOKENS, "", resumed=assign.resumed))

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        reply(PROMPT_TOKENS)

    def submit(self, prepared: Prepared, group: Group, reply: Callable[[NotServed | None], None]) -> None:
        reply(None)
        for request in group:
            self._live[request.id] = len(prepared.resumed)
            asyncio.get_running_loop().call_later(self._token_s, self._next_token, request.id)
        self.request_load()

    def cancel(self, request_ids: Iterable[str]) -> None:
        cancelled = [Output(each, finish=Finish.CANCELLED) for each in request_ids if self._end(each)]
        if cancelled and self._listener is not None:
            self._listener.outputs(cancelled)

    def release(self, groups: Sequence[Sequence[str]], reply: Callable[[list[bool]], None]) -> None:
        reply([False for _ in groups])

    def request_load(self) -> None:
        asyncio.get_running_loop().call_soon(self._report)

    def _end(self, request_id: str) -> bool:
        return self._live.pop(request_id, None) is not None

    def _next_token(self, request_id: str) -> None:
        if request_id not in self._live or self._listener is None:
            return
        self._live[request_id] += 1
        self._tokens_total += 1
        number = self._live[request_id]
        last = number == len(self._words)
        finish = Finish.STOP if last else None
        output = Output(request_id, self._words[number - 1], (number,), finish, completion_tokens=number)
        self._listener.outputs([output])
        if last:
            self._end(request_id)
            self._report()
        else:
            asyncio.get_running_loop().call_later(self._token_s, self._next_token, request_id)

    def _report_again(self) -> None:
        self._report()
        asyncio.get_running_loop().call_later(REPORT_S, self._report_again)

    def _report(self) -> None:
        if self._listener is not None:
            now_s = time.monotonic()
            self._listener.load(LoadSeen(self._figures(now_s), now_s))

    def _figures(self, now_s: float) -> LoadFigures:
        remaining = [float(len(self._words) - done) for done in self._live.values()]
        total = self._tokens_total
        if self._own is not None:
            remaining += self._own.remaining(now_s)
            total += round(self._own.tokens_total)
        values, weight = condense(remaining)
        used = round(len(remaining) * (MEAN_PROMPT + MEAN_RESPONSE))
        return LoadFigures(
            running=len(remaining),
            pending=0,
            token_load=sum(remaining),
            kv_free_tokens=max(0, KV_TOKENS - used),
            kv_reserved_tokens=0,
            tokens_per_s=len(remaining) / OwnWork.SECONDS_PER_TOKEN,
            seconds_per_iteration=OwnWork.SECONDS_PER_TOKEN,
            iteration=COST,
            running_remaining=values,
            running_weight=weight,
            pending_prompt_tokens=0,
            pending_response_tokens=0.0,
            tokens_total=total,
            prompt_tokens_total=0,
            unread_tokens=len(remaining),
            longest_iteration_s=1.0,
        )


def stand_in(number: int, options: argparse.Namespace) -> tuple[Site, Links]:
    model = Model(MODEL, "1", 8192, 1_700_000_000, ("chat", "resume"))
    hello = Hello(
        site=f"site-{number:05d}",
        boot_id=f"{number}-{time.monotonic_ns()}",
        cloud=f"cloud-{number % 3}",
        region=f"region-{number % 12}",
        models=(model,),
        slots=SLOTS,
        kv_capacity_tokens=KV_TOKENS,
        input_usd_per_mtok=0.1,
        output_usd_per_mtok=0.2,
        cached_usd_per_mtok=None,
        usd_per_hour=0.0,
        version="stand-in",
    )
    random = Random(number)
    own = OwnWork(options.busy, random, time.monotonic()) if options.busy else None
    engine = StandInEngine(options.tokens, options.token_s, own)
    site = Site(hello, engine, time.monotonic, max_preparing=1_000)
    engine.start(Listener(site.outputs, site.load, lambda _: None))
    timeouts = LinkTimeouts()

    def make_link(address: str, add_peers: Callable[[Iterable[str]], None]) -> Link:
        return Link(
            address,
            site=site,
            open_channel=open_channel,
            token=TOKEN,
            add_peers=add_peers,
            clock=time.monotonic,
            timeouts=timeouts,
            random=random,
        )

    links = Links(make_link, timeouts)
    links.add(options.join)
    return site, links


async def run(options: argparse.Namespace) -> None:
    """Join with all sites, spread their ticks over the time between two, and print again and again."""
    fleet = [stand_in(number, options) for number in range(options.first, options.first + options.sites)]
    sites, loop = [site for site, _ in fleet], asyncio.get_running_loop()
    parts, turn, shown_s = 10, 0, 0.0
    while True:
        for site in sites[turn % parts :: parts]:
            site.tick()
        turn += 1
        if loop.time() - shown_s >= options.shown_every_s:
            shown_s = loop.time()
            linked = sum(len(site.linked) for site in sites)
            reports = sum(site.load_reports.sent for site in sites)
            print(json.dumps({"linked": linked, "reports": reports}), flush=True)
        await asyncio.sleep(TICK_S / parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--join", type=lambda text: text.split(","), required=True)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first site")
    parser.add_argument("--busy", type=float, default=0.0, help="share of the slots taken by other requests")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--token-s", type=float, default=0.02)
    parser.add_argument("--shown-every-s", type=float, default=0.1)
    options = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    asyncio.run(run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
