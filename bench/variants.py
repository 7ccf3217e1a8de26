"""Measure variants that share a base: what adapters cost beside the base, engines in turn and peft.

    python -m bench.variants --model bench/models/llama-3.1-8b --tenants 1,8,32,64

A folder with nothing but a config.json gets random weights, adapters are random too. All in one run: whatever
is compared is measured in turns. On a CPU the ratios show that the bench runs, no more. Prints a JSON line
for each measurement as it is made, and at the end what it claims beside its limits. The phase `vllm`, the
last one if it is named, has vLLM decode as many rows with the same adapters; its steps are what longer
answers take more.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.support import beside_vllm
from bench.support.adapter_demand import answer_when_due, arrivals, zipf_queries
from bench.support.claims import Claims, quantile
from bench.support.live_adapters import Traffic, come_and_go, timed
from bench.support.merged import PeftMixed, serve_in_turn
from bench.support.variant_engines import BASE, Query, Scene, Sizes, decode, serve
from site_engine.engine.engine import SiteEngine
from site_engine.process_settings import set_up_collector, set_up_process
from site_engine.variants.certify import plain_model

MARGIN, TIMES_BASE = {torch.bfloat16: 0.02, torch.float32: 1e-3}, 1.5
"""How far below the best logit that of an adapter's token may lie, relative to the largest: so far, or so
many times as far as those of base rows of the same steps do by rounding.
"""
CHECKED_CHAINS, CHECKED_QUERIES = 5, 24
OWN_CHAINS = 4  # the base and variants that own layers
EIGHT = 8  # the tenants, and the rows of each, in the claims on a few tenants
MANY, MANY_ROWS = 32, 2
MANY_QUERIES = 4  # for each adapter
PART_OF_CAPACITY = 0.5  # of the engine with few slots, at which first tokens are timed
LIVE_ADDED, LIVE_PROMPT, LIVE_ANSWER = 8, 16, 24


class Bench(Claims):
    """Runs the phases on one scene; keeps the claims."""

    def __init__(self, scene: Scene, folder: Path, asked: argparse.Namespace) -> None:
        super().__init__()
        self.scene, self.folder, self.asked = scene, folder, asked
        self.tenants = [int(count) for count in asked.tenants.split(",")]
        self._seed = 0
        self._shares: list[str] = []

    def work(self, chains: Sequence[str], rows: int, tokens: int | None = None) -> list[Query]:
        """Return a query for each row, the chains' rows side by side; no prompt ever comes twice."""
        each = -(-rows // len(chains))
        made = []
        for at in range(rows):
            self._seed += 1
            made.append(Query(chains[at // each], self.scene.prompt(self._seed, tokens)))
        return made

    # ---- phases

    def exact(self) -> None:
        """Compare each token with the logits of its chain alone, given the tokens before it."""
        scene = self.scene
        chains = [*scene.tenants(min(CHECKED_CHAINS, max(self.tenants))), BASE]
        work = [Query(chains[at % len(chains)], scene.prompt(10_000 + at, (9, 40, 130)[at % 3]))
                for at in range(CHECKED_QUERIES)]  # fmt: skip
        answers = [list[int]() for _ in work]
        for first in range(0, len(work), scene.sizes.rows):
            part = work[first : first + scene.sizes.rows]
            answers[first : first + len(part)] = serve(scene.engine, part, scene.sizes.steps // 4 + 1)[1]
        gaps: dict[str, list[float]] = {"adapters": [], "base": [], "adapters' tokens by the base": []}
        plain = plain_model(scene.model.model)
        for chain in chains:
            reference = plain if chain == BASE else plain_model(scene.model.model, scene.loaded(chain))
            for query, answer in zip(work, answers, strict=True):
                if query.chain == chain:
                    own = margins(reference, query.prompt, answer)
                    gaps["base" if chain == BASE else "adapters"] += own
                    if chain != BASE:
                        gaps["adapters' tokens by the base"] += margins(plain, query.prompt, answer)
        for what, found in gaps.items():
            self.log(phase="exact", of=what, tokens=len(found), other_than_best=sum(gap > 0 for gap in found),
                     largest_gap=max(found))  # fmt: skip
        self.log(phase="exact", added_s=[round(each, 3) for each in scene.added_s])
        margin = max(MARGIN[scene.model.dtype], TIMES_BASE * max(gaps["base"]))
        self.claim("exact: largest gap of an adapter's token", max(gaps["adapters"]), margin, at_least=False)
        wrong = max(gaps["adapters' tokens by the base"])
        self.claim("exact: the same by the base, which must fail", wrong, margin, at_least=True)

    def base(self) -> None:
        """Compare steps of base rows in an engine with adapters, none in use, with one without variants."""
        scene = self.scene
        scene.tenants(min(EIGHT, max(self.tenants)))
        for rows in sorted({min(each, scene.sizes.rows) for each in (2, 8, 64)}):
            engines = {"without": scene.base, "with adapters": scene.engine, "without again": scene.base}
            found = self.in_turns({name: (engine, [BASE], rows) for name, engine in engines.items()})
            medians = {name: statistics.median(steps) for name, steps in found.items()}
            for name, steps in found.items():
                self.log(phase="base", engine=name, rows=rows, **described(steps))
            noise = abs(medians["without again"] / medians["without"] - 1)
            self.log(phase="base", rows=rows, noise=round(noise, 4))
            before = statistics.median(found["without"] + found["without again"])
            off = abs(medians["with adapters"] / before - 1)
            self.claim(f"base: {rows} rows, no adapter in use, step changed by", off, 0.01, at_least=False)

    def steps(self) -> None:
        """Compare steps of tenants' rows with steps of as many base rows, and an engine without variants."""
        scene = self.scene
        rows = scene.sizes.rows
        cases = [(EIGHT, EIGHT), *((count, rows) for count in self.tenants)]
        for count, all_rows in dict.fromkeys(cases):
            if count > min(all_rows, max(self.tenants)):
                continue
            chains = scene.tenants(count)
            for slots in sorted({count, scene.sizes.slots}) if count <= scene.sizes.slots else [count]:
                engine = scene.with_slots(slots, chains)
                found = self.in_turns({
                    "base": (scene.base, [BASE], all_rows), "adapters": (engine, chains, all_rows)
                })  # fmt: skip
                speed = statistics.fmean(found["base"]) / statistics.fmean(found["adapters"])
                slower = statistics.median(found["adapters"]) / statistics.median(found["base"]) - 1
                self.log(phase="steps", adapters=count, rows=all_rows, slots=slots, of_base=round(speed, 4),
                         slower=round(slower, 4), base=described(found["base"]),
                         with_adapters=described(found["adapters"]))  # fmt: skip
                where = f"steps: {count} adapters, {all_rows} rows, {slots} slots"
                self.share(f"Mico, {where}", *(1e3 * statistics.fmean(each) for each in found.values()))
                if count == EIGHT:
                    limit = 0.10 if scene.model.model.config.hidden_size > 2000 else 0.35
                    self.claim(f"{where}, slower by", slower, limit, at_least=False)
                if count * MANY_ROWS == all_rows:
                    self.claim(f"{where}, share of base throughput", speed, 0.85, at_least=True)
                scene.forget(slots)

    def turns(self) -> None:
        """Serve tenants' queries together, beside a process for each model and beside peft."""
        scene, tokens = self.scene, self.scene.sizes.steps
        rows = scene.sizes.rows
        for count in self.few_and_many():
            chains = scene.tenants(count)
            work = self.work(chains, rows)
            serve(scene.engine, self.work(chains, rows), tokens)
            serve_in_turn(scene, self.work(chains[:1], rows // count), tokens)
            together_s, answers = serve(scene.engine, work, tokens)
            alone_s, others = serve_in_turn(scene, work, tokens)
            same = sum(a == b for a, b in zip(answers, others, strict=True))
            self.log(phase="turns", adapters=count, rows=rows, tokens=tokens, together_s=round(together_s, 3),
                     in_turn_s=round(alone_s, 3), speedup=round(alone_s / together_s, 3),
                     same_answers=f"{same} of {rows}")  # fmt: skip
            few = self.in_turns({
                "in turn": (scene.base, [BASE], rows // count), "together": (scene.engine, chains, rows)
            })  # fmt: skip
            speedup = count * statistics.fmean(few["in turn"]) / statistics.fmean(few["together"])
            self.log(phase="turns", adapters=count, rows=rows, in_turn=described(few["in turn"]),
                     together=described(few["together"]), steps_speedup=round(speedup, 3))  # fmt: skip
            if count == EIGHT:
                what = f"turns: {count} x {rows // count} rows, times the throughput of engines in turn"
                self.claim(f"{what}, whole answers", alone_s / together_s, 5.0, at_least=True)
                self.claim(f"{what}, steps", speedup, 5.0, at_least=True)

    def own(self) -> None:
        """Compare the base and variants that own some of its layers, together, with engines in turn."""
        scene, share = self.scene, self.asked.own
        on_gpu = scene.model.device.type == "cuda"
        base_bytes = sum(each.nbytes for each in scene.model.model.parameters())
        before = torch.cuda.memory_allocated() if on_gpu else 0
        chains = [*scene.own_layers(OWN_CHAINS - 1, share), BASE]
        own_bytes = torch.cuda.memory_allocated() - before if on_gpu else 0
        rows = OWN_CHAINS * EIGHT
        found = self.in_turns({
            "in turn": (scene.base, [BASE], EIGHT), "together": (scene.engine, chains, rows)
        })  # fmt: skip
        speedup = OWN_CHAINS * statistics.fmean(found["in turn"]) / statistics.fmean(found["together"])
        memory = (base_bytes + own_bytes) / (OWN_CHAINS * base_bytes)
        self.log(phase="own", chains=OWN_CHAINS, rows=rows, share_of_layers=share, base_bytes=base_bytes,
                 own_bytes=own_bytes, in_turn=described(found["in turn"]),
                 together=described(found["together"]))  # fmt: skip
        what = f"own: {share:.0%} of the layers, {OWN_CHAINS} x {EIGHT} rows"
        self.claim(f"{what}, steps, times engines in turn", speedup, 2.0, at_least=True)
        if on_gpu:
            self.claim(f"{what}, memory of as many engines", memory, 0.408, at_least=False)

    def peft(self) -> None:
        """Serve the same queries by transformers and peft, in mixed batches."""
        scene = self.scene
        rows, tokens = scene.sizes.rows, max(4, scene.sizes.steps // 8)
        for count in self.few_and_many():
            chains = scene.tenants(count)
            try:
                peer = PeftMixed(scene, chains, self.folder)
            except ImportError as error:
                self.log(phase="peft", error=str(error))
                return
            work = self.work(chains, rows)
            peer.serve(work, 2)
            theirs_s, theirs = peer.serve(work, tokens)
            serve(scene.engine, self.work(chains, rows), tokens)
            ours_s, ours = serve(scene.engine, work, tokens)
            same = sum(a == b for a, b in zip(ours, theirs, strict=True))
            self.log(phase="peft", adapters=count, rows=rows, tokens=tokens, ours_s=round(ours_s, 3),
                     theirs_s=round(theirs_s, 3), speedup=round(theirs_s / ours_s, 2),
                     same_answers=f"{same} of {rows}")  # fmt: skip

    def live(self) -> None:
        """Add adapters, use and remove them while all other rows decode; time every step."""
        scene = self.scene
        rows, tokens = scene.sizes.rows - 2, scene.sizes.prompt_tokens + scene.sizes.steps
        used = min(EIGHT, scene.sizes.slots - 1, max(self.tenants))
        chains = [*scene.tenants(used), BASE]
        added = [scene.adapter(1_000 + number) for number in range(LIVE_ADDED + 1)]
        traffic = Traffic(
            scene.engine, chains, rows, lambda chain: self.work([chain], 1, LIVE_PROMPT)[0], tokens
        )
        timed(traffic, come_and_go(traffic, added[:1], LIVE_ANSWER))  # compiles what adding needs
        set_up_collector()  # as a site does once it has started
        calm = timed(traffic, repeat("calm", 4 * scene.sizes.steps))
        steps = timed(traffic, come_and_go(traffic, added[1:], LIVE_ANSWER))
        traffic.end()
        for name, some in (("nothing added", calm), ("added and removed", steps)):
            largest = sorted(some, key=lambda step: -step.seconds)[:6]
            shown = [{"ms": round(one.seconds * 1e3, 3), "step": one.what} for one in largest]
            found = described([one.seconds for one in some])
            self.log(phase="live", of=name, adapters=len(added) - 1, **found, largest=shown)
            for what in sorted({one.what for one in some}):
                part = [one.seconds for one in some if one.what == what]
                self.log(phase="live", of=name, during=what, **described(part))
        took = [step.seconds for step in steps]
        longest = max(took) / statistics.median(took)
        self.claim("live: longest step, times the median", longest, 2.0, at_least=False)

    def many(self) -> None:
        """Ask for very many adapters, few of them often: some slots beside a slot for each."""
        scene, tokens = self.scene, self.scene.tokens_of_row
        chains = scene.tenants(self.asked.many)
        self.log(phase="many", adapters=len(chains), added_s=round(sum(scene.added_s), 1))
        count = len(chains) * MANY_QUERIES
        limits = {"vocab_size": scene.model.vocab_size, "context_tokens": tokens}
        slots = (self.asked.many_slots, len(chains))
        some, every = (scene.with_slots(each, chains, warm=True) for each in slots)
        for exponent in map(float, self.asked.zipf.split(",")):
            for engine in (some, every):
                answer_when_due(
                    engine, zipf_queries(chains, count // 8, exponent, **limits, seed=1), [0.0] * count
                )
            asked = zipf_queries(chains, count, exponent, **limits, seed=2)
            at_once = [answer_when_due(engine, asked, [0.0] * count) for engine in (some, every)]
            share = at_once[0].tokens_per_s / at_once[1].tokens_per_s
            per_s = PART_OF_CAPACITY * count / at_once[0].seconds
            come = arrivals(count // 2, per_s)
            paced = [answer_when_due(engine, asked[: count // 2], come) for engine in (some, every)]
            first = [quantile([each for each, is_in in zip(one.first_token_s, paced[0].resident, strict=True)
                               if is_in], 0.99) for one in paced]  # fmt: skip
            for name, passes in (("all at once", at_once), (f"{per_s:.1f} queries/s", paced)):
                for engine, one in zip((some, every), passes, strict=True):
                    first_ms = {
                        f"p{part}": round(1e3 * quantile(one.first_token_s, part / 100), 2)
                        for part in (50, 99)
                    }
                    self.log(phase="many", zipf=exponent, demand=name, slots=engine.settings.adapter_slots,
                             tokens_per_s=round(one.tokens_per_s), seconds=round(one.seconds, 2),
                             placed=one.placed, resident=round(statistics.fmean(one.resident), 3),
                             first_token_ms=first_ms)  # fmt: skip
            where = f"many: {len(chains)} adapters, {self.asked.many_slots} slots, Zipf {exponent}"
            self.claim(f"{where}, throughput of all resident", share, 0.7, at_least=True)
            what = f"{where}, p99 first token of residents, times that of all resident"
            self.claim(what, first[0] / first[1], 1.2, at_least=False)

    def vllm(self) -> None:
        """Time steps of vLLM with adapters and of as many base rows, after our engines have ended."""
        scene, rows = self.scene, self.scene.sizes.rows
        few, many = min(self.few_and_many()), max(self.few_and_many())
        cases = list(dict.fromkeys([(few, few), (few, rows), (many, rows)]))
        folders = [scene.adapter(number).adapter for number in range(many)]
        sizes = scene.sizes
        shape = {
            "prompt_tokens": sizes.prompt_tokens, "steps": sizes.steps, "vocab_size": scene.model.vocab_size
        }  # fmt: skip
        scene.close()
        for slots in sorted({few, many}):
            arguments = {
                "enable_lora": True, "max_loras": slots, "max_lora_rank": sizes.rank, "max_num_seqs": rows,
                "max_model_len": sizes.prompt_tokens + beside_vllm.SETTLED_TOKENS + sizes.steps + 1,
                "enable_prefix_caching": False, "gpu_memory_utilization": beside_vllm.PART_OF_MEMORY,
            }  # fmt: skip
            some = [case for case in cases if case[0] <= slots]
            asked = [(0, all_rows) for all_rows in dict.fromkeys(all_rows for _, all_rows in some)] + some
            passes = [
                each
                for count, all_rows in asked
                for each in beside_vllm.step_passes(f"{count} {all_rows}", all_rows, adapters=count, **shape)
            ]
            served = beside_vllm.serve(
                self.asked.vllm_path, Path(self.asked.model), arguments, passes, folders,
                within_s=self.asked.vllm_within,
            )  # fmt: skip
            self.log(phase="vllm", slots=slots, **served.figures())
            for count, all_rows in some:
                base, more = (served.step_ms(f"{each} {all_rows}", sizes.steps) for each in (0, count))
                if base and more:
                    self.log(phase="vllm", adapters=count, rows=all_rows, slots=slots,
                             of_base=round(base / more, 4), slower=round(more / base - 1, 4),
                             base_ms=round(base, 4), with_adapters_ms=round(more, 4))  # fmt: skip
                    where = f"{count} adapters, {all_rows} rows, {slots} slots"
                    self.share(f"vLLM, steps: {where}", base, more)
            if served.error:
                self._shares.append(f"vLLM, {slots} slots: {served.error}")

    # ---- what phases share

    def share(self, what: str, base_ms: float, adapters_ms: float) -> None:
        """Keep what a step of base rows takes and one with adapters, for the table."""
        part = base_ms / adapters_ms
        self._shares.append(
            f"{base_ms:8.3f} ms {adapters_ms:8.3f} with adapters, {part:.3f} of throughput: {what}"
        )

    def few_and_many(self) -> list[int]:
        """Return the numbers of tenants that are compared with peers; all of them have a slot."""
        most = min(max(self.tenants), self.scene.sizes.slots)
        return sorted({min(EIGHT, most), min(MANY, most)})

    def in_turns(self, cases: dict[str, tuple[SiteEngine, list[str], int]]) -> dict[str, list[float]]:
        """Time the steps of each case, `rounds` times in turns; a first round warms up and is not counted."""
        steps = self.scene.sizes.steps
        found: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(self.asked.rounds + 1):
            for name, (engine, chains, rows) in cases.items():
                took = decode(engine, self.work(chains, rows), steps)
                found[name] += took if number else []
        return found

    def table(self) -> str:
        """Return steps beside those of the base, then what is claimed beside its limit, a line for each."""
        claims = [
            f"{'held  ' if each.held else 'MISSED'} {each.value:9.4f} "
            f"{'at least' if each.at_least else 'at most '} {each.limit:<6g} {each.what}"
            for each in self.claims
        ]
        return "\n".join([*self._shares, *claims])


def margins(reference: Any, prompt: list[int], answer: list[int]) -> list[float]:
    """Return how far each token's logit is below the best, relative to the largest, given those before it."""
    whole = torch.tensor([prompt + answer], device=reference.device)
    with torch.inference_mode():
        logits = reference(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
    gaps: list[float] = ((logits.amax(1) - chosen) / logits.abs().amax(1)).tolist()
    return gaps


def described(took_s: Sequence[float]) -> dict[str, float]:
    """Return figures of steps in milliseconds, and how many took over twice the median."""
    ordered = sorted(took_s)
    middle = statistics.median(ordered)
    return {
        "steps": len(ordered),
        "median_ms": round(middle * 1e3, 4),
        "mean_ms": round(statistics.fmean(ordered) * 1e3, 4),
        "p99_ms": round(quantile(ordered, 0.99) * 1e3, 4),
        "max_ms": round(ordered[-1] * 1e3, 4),
        "over_twice": sum(each > 2 * middle for each in ordered),
    }


PHASES = ("exact", "base", "steps", "turns", "live", "peft")
MORE_PHASES = ("many", "own", "vllm")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.variants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder of a model, or of a config.json alone")
    parser.add_argument("--tenants", default="1,8,32,64", help="adapters that share a step")
    parser.add_argument("--do", default=",".join(PHASES), help="phases, in this order")
    parser.add_argument("--rows", type=int, default=64, help="that decode at once")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=32, help="adapters in the engine of most phases")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=128, help="of a pass, and tokens of a whole answer")
    parser.add_argument("--rounds", type=int, default=3, help="passes of each case, in turns")
    parser.add_argument("--many", type=int, default=1000, help="adapters of the phase many, which --do names")
    parser.add_argument("--own", type=float, default=0.2, help="share of layers in the phase own, likewise")
    parser.add_argument("--many-slots", type=int, default=8, help="of them in the engine at once")
    parser.add_argument("--zipf", default="1.0,1.5", help="exponents of demand in the phase many")
    parser.add_argument("--seconds", type=float, default=1e9, help="no phase begins after so many")
    beside_vllm.add_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    if "vllm" in asked.do.split(",")[:-1]:
        parser.error("vllm comes last: it has the memory of the engines")
    if unknown := set(asked.do.split(",")) - {*PHASES, *MORE_PHASES}:
        known = ", ".join(PHASES + MORE_PHASES)
        parser.error(f"no phase {', '.join(sorted(unknown))}; there are {known}")
    return asked


def main() -> int:
    asked = arguments()
    set_up_process()  # as the process of an engine does
    if asked.device.startswith("cuda"):
        torch.set_num_threads(1)  # likewise
    sizes = Sizes(asked.rank, asked.slots, asked.rows, asked.prompt_tokens, asked.steps)
    device = torch.cuda.get_device_name() if asked.device == "cuda" else platform.processor() or "CPU"
    with tempfile.TemporaryDirectory() as temporary:
        began_s = time.perf_counter()
        scene = Scene(asked.model, asked.device, Path(temporary), sizes)
        bench = Bench(scene, Path(temporary), asked)
        bench.log(model=asked.model, device=device, torch=torch.__version__, graphs=scene.graphs,
                  transformers=transformers.__version__, **sizes._asdict())  # fmt: skip
        for name in asked.do.split(","):
            if time.perf_counter() - began_s > asked.seconds:
                bench.log(phase=name, error="no time")
                continue
            getattr(bench, name)()
        print(bench.table())
        print(json.dumps({"claims": [{**each._asdict(), "held": each.held} for each in bench.claims]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
