"""What is remembered of prompts: their common beginnings, by tenant and model, within bounds."""

from __future__ import annotations

from itertools import count, islice, pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Credit, LoadReport, Model, SiteIdentity
from gateway.federation.directory import Directory
from gateway.prompt import Chat, Images, Message
from gateway.routing.prefixes import (
    ENDS,
    EPOCH_S,
    EVICTED_AFTER,
    HINTED_SHARE,
    MAX_CHARS,
    MAX_HOLDERS,
    MIN_TRUST,
    NOTHING_CACHED,
    PrefixIndex,
    prefix_of,
)

texts = st.text(alphabet="ab", max_size=400)


@given(texts, texts, texts)
def test_prompts_share_the_hashes_of_their_common_beginning(common: str, one: str, other: str) -> None:
    first, second = (prefix_of(common + each, "t", "m") for each in (one, other))
    shared = len([1 for a, b in zip(first.hashes, second.hashes, strict=False) if a == b])
    length = next(
        (i for i, (a, b) in enumerate(zip(common + one, common + other, strict=False)) if a != b), None
    )
    length = min(first.prompt_bytes, second.prompt_bytes) if length is None else length
    assert shared == 0 or ENDS[shared - 1] <= length
    assert shared == min(len(first.hashes), len(second.hashes)) or length < ENDS[shared]


def test_hashes_are_of_one_tenant_and_one_model_and_the_same_in_every_process() -> None:
    text = "x" * 64
    assert prefix_of(text, "t", "m").hashes == (bytes.fromhex("de0f6c16a50bc734"),)
    assert len({prefix_of(text, *of).hashes for of in (("t", "m"), ("u", "m"), ("t", "n"), ("tm", ""))}) == 4


def test_all_that_a_template_writes_counts() -> None:
    chats = [
        Chat((Message("user", "x" * 200),)),
        Chat((Message("system", "x" * 200),)),
        Chat((Message("user", "x" * 200),), tools_json="[]"),
        Chat((Message("user", "x" * 200),), template_kwargs_json='{"enable_thinking":false}'),
        Chat((Message("user", "x" * 200, images=Images('[{"type":"image_url"}]', 100, False)),)),
        Chat((Message("user", "x" * 200, reasoning="y"),)),
    ]
    assert len({prefix_of(chat, "t", "m").hashes for chat in chats}) == len(chats)


def test_token_ids_and_lone_surrogates_are_prompts_as_well() -> None:
    ids = tuple(range(100))
    assert prefix_of(ids, "t", "m").hashes[:2] == prefix_of((*ids[:32], 7), "t", "m").hashes[:2]
    assert prefix_of("\ud800" * 64, "t", "m").hashes


def test_a_block_is_at_most_a_quarter_of_what_it_ends_beyond_the_first_ones() -> None:
    sizes = [end - begin for begin, end in pairwise((0, *ENDS))]
    assert all(size <= max(64, end / 4) for size, end in zip(sizes, ENDS, strict=True))


def test_the_longest_beginning_of_each_site_is_expected() -> None:
    index, text = PrefixIndex(), "abcdefghijklmnop" * 64
    index.record(prefix_of(text[:256], "t", "m"), "short", 0.0)
    index.record(prefix_of(text[:512], "t", "m"), "long", 0.0)
    expected = index.expected(prefix_of(text, "t", "m"))
    assert expected.by_site == {"short": 0.25, "long": 0.5}
    assert expected.at("another") == 0.0
    assert expected.times(100).at("long") == 50.0


def test_what_many_sites_have_every_site_is_expected_to_have() -> None:
    index, text = PrefixIndex(), "abcdefghijklmnop" * 64
    for number in range(MAX_HOLDERS + 1):
        index.record(prefix_of(text[:256], "t", "m"), f"site-{number}", 0.0)
    index.record(prefix_of(text[:512], "t", "m"), "one", 0.0)
    expected = index.expected(prefix_of(text, "t", "m"))
    assert (expected.at("one"), expected.at("any")) == (0.5, 0.25)


def test_what_all_of_few_sites_have_favours_none_of_them() -> None:
    index, text, sites = PrefixIndex(), "abcdefghijklmnop" * 64, ("a", "b", "c")
    asked = prefix_of(text, "t", "m")
    for site in sites[:2]:
        index.record(prefix_of(text[:256], "t", "m"), site, 0.0)
    assert index.expected(asked, sites).by_site == {"a": 0.25, "b": 0.25}, "one has to compute it"
    index.record(prefix_of(text[:256], "t", "m"), "c", 0.0)
    assert index.expected(asked, sites) == NOTHING_CACHED
    assert index.expected(asked, (*sites, "new")).by_site == dict.fromkeys(sites, 0.25)
    index.record(prefix_of(text[:512], "t", "m"), "b", 0.0)
    expected = index.expected(asked, sites)
    assert expected.by_site == {"b": 0.5}
    assert expected.at("a") == 0.25
    index.forget("c")
    assert index.expected(asked, sites).by_site == {"a": 0.25, "b": 0.5}, "it has to be computed there again"


def test_entries_are_bounded_in_number_and_age() -> None:
    index, kept = PrefixIndex(max_prefixes=100, max_age_s=10.0), prefix_of("kept" * 32, "t", "m")
    for number in range(1_000):
        index.record(prefix_of(str(number) * 64, "t", "m"), "a", 0.0)
        index.record(kept, "b", 0.0)
        assert len(index) <= 100
    assert index.expected(kept).at("b") == 1.0, "what is in use stays"
    for now_s in (11.0, 22.0):
        index.record(prefix_of("other" * 32, "t", "m"), "a", now_s)
    assert not index.expected(kept).by_site


def test_trust_follows_what_a_site_really_had() -> None:
    index, prefix, times_s = PrefixIndex(), prefix_of("x" * 256, "t", "m"), count(0.0, 2 * EPOCH_S)

    def trust_after(found: float) -> float:
        for now_s in islice(times_s, 50):
            index.record(prefix, "a", now_s)
            index.correct(index.expected(prefix), "a", found)
        index.record(prefix, "a", next(times_s))
        return index.expected(prefix).at("a")

    assert trust_after(0.0) == MIN_TRUST
    assert abs(trust_after(0.8) - 0.8) < 0.01


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2_000)), max_size=8),
    st.integers(0, 2),
    st.integers(1, 2_000),
)
def test_no_more_is_expected_than_was_computed_and_little_less(
    computed: list[tuple[int, int]], of: int, chars: int
) -> None:
    texts = ["".join(f"{talk}{n:04d} " for n in range(400)) for talk in "abc"]
    index = PrefixIndex()
    for number, (talk, length) in enumerate(computed):
        index.record(prefix_of(texts[talk][:length], "t", "m"), f"s{number % 3}", float(number))
    expected = index.expected(prefix_of(texts[of][:chars], "t", "m"))
    for site in ("s0", "s1", "s2"):
        had = [length for n, (talk, length) in enumerate(computed) if talk == of and f"s{n % 3}" == site]
        most = min(chars, max(had, default=0))
        assert most * 0.75 - 64 <= expected.at(site) * chars <= most + 1e-6


class Asked(bytes):
    """A hash that counts how often a map is asked for it."""

    times = 0

    def __hash__(self) -> int:
        Asked.times += 1
        return super().__hash__()


def test_a_lookup_asks_for_few_hashes_of_a_long_chain() -> None:
    index, text = PrefixIndex(), "".join(f"{number} " for number in range(20_000))
    index.record(prefix_of(text[:2_000], "t", "m"), "short", 0.0)
    index.record(prefix_of(text[:90_000], "t", "m"), "long", 0.0)
    prefix = prefix_of(text[:100_000], "t", "m")
    asked = prefix._replace(hashes=tuple(map(Asked, prefix.hashes)))
    Asked.times = 0
    found = index.expected(asked).by_site
    assert found == index.expected(prefix).by_site
    assert found.keys() == {"short", "long"}
    assert Asked.times < len(prefix.hashes) // 2


@given(texts, st.sampled_from(("t", "u", "")), st.sampled_from(("m", "n")))
def test_no_prompt_of_another_tenant_or_model_is_ever_found(text: str, tenant: str, model: str) -> None:
    index = PrefixIndex()
    own, other = prefix_of(text * 3, "mine", "m", "talk"), prefix_of(text * 3, tenant, model, "talk")
    index.record(own, "a", 0.0)
    index.record_announced(own.announced, "b", 0.0)
    assert not index.expected(other).by_site


def test_a_site_that_evicted_a_prefix_has_lost_all_older_ones() -> None:
    index = PrefixIndex()
    older, old, newer = (prefix_of(text * 512, "t", "m") for text in "xyz")
    for number, prefix in enumerate((older, old, newer)):
        index.record(prefix, "a", 10.0 * number)
        index.record(prefix, "b", 10.0 * number)
    index.correct(index.expected(old), "a", 0.0)
    assert [index.expected(each).at("a") for each in (older, old)] == [0.0, 0.0]
    assert index.expected(newer).at("a") > 0.5
    assert index.expected(older).at("b") == 1.0, "another site has lost nothing"
    index.record(old, "a", 30.0)
    assert index.expected(old).at("a") > 0.5, "it has computed it anew"


@given(
    st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=2, max_size=12), st.integers(1, 2_000)
)
def test_what_a_site_computed_is_lost_once_it_has_computed_more_than_fits_its_cache(
    computed: list[tuple[int, bool]], room_tokens: int
) -> None:
    index, counted, totals = PrefixIndex(), 0, []
    prefixes = [prefix_of(f"{number:04d}" * 64, "t", "m") for number in range(len(computed))]
    index.record(prefixes[0], "a", 0.0)  # before the first report
    for number, (tokens, is_elsewhere) in enumerate(computed):
        index.advance("a", counted := counted + tokens, room_tokens)
        if number and not is_elsewhere:
            totals.append((number, counted))
            index.record(prefixes[number], "a", 2 * EPOCH_S * number)
    kept = [number for number, total in totals if total >= counted - EVICTED_AFTER * room_tokens]
    found = [number for number, _ in totals if index.expected(prefixes[number]).by_site]
    assert found == kept
    assert bool(index.expected(prefixes[0]).by_site) == (len(kept) == len(totals))


def test_a_site_that_does_not_say_what_it_computed_loses_nothing_by_it() -> None:
    index, prefix = PrefixIndex(), prefix_of("x" * 512, "t", "m")
    index.record(prefix, "a", 0.0)
    for tokens, room_tokens in ((0, 100), (0, 0), (1_000, 0), (2_000, 0)):
        index.advance("a", tokens, room_tokens)
    index.advance("never met", 1_000, 100)
    assert index.expected(prefix).at("a") == 1.0


def test_a_site_that_starts_anew_counts_from_0() -> None:
    index, before, after = PrefixIndex(), *(prefix_of(text * 512, "t", "m") for text in "xy")
    index.record(before, "a", 0.0)
    index.advance("a", 1_000_000, 100)
    index.forget("a")
    index.record(after, "a", 10.0)
    for tokens in (50, 100):
        index.advance("a", tokens, 100)
        index.record(after, "a", 10.0)
    index.advance("a", 250, 100)
    assert (index.expected(before).at("a"), index.expected(after).at("a")) == (0.0, 1.0)
    index.advance("a", 251, 100)
    assert not index.expected(after).by_site


def test_a_report_tells_what_a_site_has_lost() -> None:
    directory, prefix = Directory(), prefix_of("x" * 512, "t", "m")
    models = {"m": Model("m", "r", 4096, 0, "o")}
    directory.join(SiteIdentity("a", "b", "c", "r", models, slots=8, kv_capacity_tokens=1_000), 0.0)
    directory.prefixes.record(prefix, "a", 0.0)
    for seq, (tokens, share) in enumerate(((5_000, 1.0), (6_500, 1.0), (6_501, 0.0)), 1):
        report = LoadReport(seq, 0.0, computed_tokens_total=tokens)
        directory.report("a", report, Credit())
        if seq == 1:
            directory.prefixes.record(prefix, "a", 0.0)
        assert directory.prefixes.expected(prefix).at("a") == share


def test_a_site_that_starts_anew_has_nothing() -> None:
    index, prefix = PrefixIndex(), prefix_of("x" * 512, "t", "m")
    index.record(prefix, "a", 1.0)
    index.forget("a")
    assert not index.expected(prefix).by_site
    index.record(prefix, "a", 2.0)
    assert index.expected(prefix).at("a") == 1.0


def test_a_hint_tells_where_texts_differ_until_it_proves_wrong() -> None:
    index = PrefixIndex()
    first, second, third = (prefix_of(text * 512, "t", "m", "talk 1") for text in "xyz")
    index.record(first, "a", 0.0)
    expected = index.expected(second)
    assert (expected.at("a"), expected.at("b")) == (HINTED_SHARE, 0.0)
    assert index.expected(first).at("a") == 1.0, "the text itself tells more"
    assert not index.expected(prefix_of("y" * 512, "t", "m", "talk 2")).by_site
    assert not index.expected(prefix_of("y" * 512, "t", "m")).by_site
    index.correct(expected, "a", 0.0)
    assert index.expected(first).at("a") == 1.0, "nothing was learned of texts"
    index.record(second, "a", 10.0)
    assert not index.expected(third).by_site


def test_a_hint_that_queries_of_many_sites_share_favours_none() -> None:
    index = PrefixIndex()
    for number in range(MAX_HOLDERS + 1):
        index.record(prefix_of(str(number) * 512, "t", "m", "one for all"), f"site-{number}", 0.0)
    assert not index.expected(prefix_of("x" * 512, "t", "m", "one for all")).by_site


def test_the_longest_hash_is_enough_to_tell_another_gateway() -> None:
    here, there, text = PrefixIndex(), PrefixIndex(), "abcdefghijklmnop" * 64
    told = prefix_of(text[:512], "t", "m")
    there.record_announced(told.announced, "a", 0.0)
    here.record(told, "a", 0.0)
    longer = prefix_of(text, "t", "m")
    assert there.expected(longer).by_site == here.expected(longer).by_site


def test_a_huge_prompt_costs_no_more_hashes_than_a_long_one() -> None:
    half = "x" * MAX_CHARS
    huge = prefix_of(Chat((Message("user", half), Message("user", half))), "t", "m")
    assert len(huge.hashes) == len(ENDS) and huge.prompt_bytes > 2 * MAX_CHARS
    assert prefix_of(tuple(range(MAX_CHARS)), "t", "m").prompt_bytes == 4 * MAX_CHARS
    umlauts = prefix_of("ä" * MAX_CHARS, "t", "m")
    assert (len(umlauts.hashes), umlauts.prompt_bytes) == (len(ENDS), 2 * MAX_CHARS)


def test_what_is_known_of_sites_is_forgotten_with_what_they_hold() -> None:
    index = PrefixIndex(max_prefixes=100, max_age_s=10.0)
    for number in range(1_000):
        index.record(prefix_of(str(number) * 64, "t", "m"), f"site-{number}", float(number))
    assert len(index._caches) < 100
