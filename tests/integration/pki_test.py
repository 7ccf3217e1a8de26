"""A real site gets its certificate from a real gateway, is cut off when revoked, renews without a break."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import grpc
import pytest

import migrations
from gateway.domain import SiteState
from gateway.federation.directory import Directory
from gateway.federation.server import Federation, FederationSettings, listen
from gateway.federation.site_auth import Certificates
from gateway.security.login_limiter import MAX_FAILURES, LoginLimiter
from gateway.security.pki import invitation
from gateway.security.pki.authority import MAX_CSR_BYTES, Authority
from gateway.security.pki.server_certificate import SelfIssuedCertificate
from gateway.security.tls import grpc_credentials
from gateway.store.store import Store, open_store
from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.errors import LinkLost
from site_engine.federation.dial import identity_of
from tests.support.fakes.federation import TOKEN, until
from tests.support.site_fakes import fake_loaded
from wire import federation_pb2 as pb
from wire import federation_pb2_grpc as rpc

PEPPER = "p" * 32


@dataclass
class Scene:
    folder: Path
    authority: Authority
    store: Store
    federation: Federation
    enrol_at: str
    gateways: tuple[str, ...]
    now_s: float = 0.0  # beyond the real time

    def invite(self, site: str) -> str:
        now = int(time.time() + self.now_s)
        made = invitation.Invitation(site, now, now + 3600)
        return invitation.sign(made, self.authority.secret(invitation.PURPOSE))

    def config(self, site: str, **more: Any) -> SiteConfig:
        (self.folder / "ca.pem").write_bytes(self.authority.pem)
        settings: dict[str, Any] = {
            "site": site,
            "model": "letters",
            "gateways": self.gateways,
            "tls": True,
            "tls_ca": self.folder / "ca.pem",
            "identity": self.folder / site,
            "enrol_at": self.enrol_at,
        }
        return SiteConfig(**(settings | more))

    def state(self, name: str) -> SiteState | None:
        return next((site.state for site in self.federation.directory.sites if site.name == name), None)

    @asynccontextmanager
    async def site(self, config: SiteConfig) -> AsyncIterator[None]:
        loaded = fake_loaded()
        running = asyncio.create_task(serve(config, lambda _: loaded))
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def looking_often(_: float) -> None:
    """Refresh certificates often, while sites have all the time that they need to answer a ping."""
    await asyncio.sleep(0.01)


def play(folder: Path, scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        patient.setattr("gateway.federation.server.MISSED_HEARTBEATS", inf)
        patient.setattr("gateway.federation.pings.MAX_UNANSWERED_PINGS", inf)
        url = f"sqlite:///{folder / 'mico.db'}"
        await asyncio.to_thread(migrations.upgrade, url)
        authority = Authority.create(folder / "pki", "test", datetime.now(UTC))
        async with asyncio.timeout(60), open_store(url, folder, pepper=PEPPER) as store:
            await store.certificates.start()
            here = Scene(folder, authority, store, None, "", ())  # type: ignore[arg-type]
            certificates = Certificates(authority, store.certificates, lambda: time.time() + here.now_s)
            settings = FederationSettings("east", (TOKEN,), heartbeat_s=60.0)
            clock = asyncio.get_running_loop().time
            here.federation = Federation(settings, Directory(), clock, certificates, looking_often)
            shown = SelfIssuedCertificate(authority, ("127.0.0.1",))
            server, port, mutual_port = await listen(
                here.federation,
                "127.0.0.1:0",
                grpc_credentials(shown),
                ("127.0.0.1:0", grpc_credentials(shown, authority.pem)),
            )
            here.enrol_at, here.gateways = f"127.0.0.1:{port}", (f"127.0.0.1:{mutual_port}",)
            try:
                await scenario(here)
            finally:
                await server.stop(None)

    with pytest.MonkeyPatch.context() as patient:
        asyncio.run(main())


def test_a_site_joins_by_a_certificate_that_it_got_with_its_join_secret(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        config = here.config("alpha", join_secret=here.invite("alpha"))
        async with here.site(config):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready")
        (row,) = await here.store.certificates.list_sites()
        assert (row.site, row.renewals, row.revoked_at) == ("alpha", 0, None)
        assert (tmp_path / "alpha" / "site-key.pem").stat().st_mode & 0o777 == 0o600
        await until(lambda: here.state("alpha") is SiteState.DOWN, "alpha is gone")
        async with here.site(replace(config, join_secret="")):  # the certificate in the folder is enough
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready again")

    play(tmp_path, scenario)


def test_a_certificate_is_for_the_name_that_was_invited(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        config = here.config("beta", join_secret=here.invite("alpha"))
        async with here.site(config):
            await until((tmp_path / "beta" / "site.pem").exists, "the certificate is issued")
            (row,) = await here.store.certificates.list_sites()
            assert row.site == "alpha"
        identity = identity_of(config)
        assert identity is not None
        status = await joining_as("beta", here.gateways[0], identity.credentials())
        assert status == (
            grpc.StatusCode.PERMISSION_DENIED,
            "the certificate is that of site alpha, not of beta",
        )
        assert here.state("beta") is None

    play(tmp_path, scenario)


def test_a_revoked_site_is_cut_off_and_comes_back_only_when_invited_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.certificates.REFRESH_S", 3600.0)  # nobody waits for the next look

    async def scenario(here: Scene) -> None:
        config = here.config("alpha", join_secret=here.invite("alpha"))
        async with here.site(config):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready")
            await here.store.certificates.revoke("alpha", "stolen")
            await until(lambda: here.state("alpha") is SiteState.DOWN, "alpha is cut off")
        identity = identity_of(config)
        assert identity is not None and identity.is_valid
        code, reason = await joining_as(None, here.gateways[0], identity.credentials())
        assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "alpha: its certificate was revoked")
        identity.invalidate()
        with pytest.raises(LinkLost, match="the join secret was revoked"):
            await identity.renew()
        (row,) = await here.store.certificates.list_sites()
        assert (row.serial, row.reason) == (None, "stolen")
        here.now_s = 4.0  # what is issued from now on is later than the revocation
        async with here.site(replace(config, join_secret=here.invite("alpha"))):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is back")

    play(tmp_path, scenario)


def test_a_link_outlives_its_first_certificate_if_that_is_renewed(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        config = here.config("alpha", join_secret=here.invite("alpha"))
        async with here.site(config):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready")
            link = here.federation.links["alpha"]
            here.now_s = 13 * 3600.0
            identity = identity_of(replace(config, join_secret="", enrol_at=""))
            assert identity is not None
            await identity.renew()
            (row,) = await here.store.certificates.list_sites()
            assert row.renewals == 1
            here.now_s = 25 * 3600.0  # the first one has expired by now
            silent_since_s = link.silent_since_s
            await until(lambda: link.silent_since_s > silent_since_s, "a heartbeat later")
            assert here.federation.links["alpha"] is link
            here.now_s = 38 * 3600.0
            await until(lambda: link.closing, "and nobody renewed the second")
            assert link.closing == "its certificate has expired and was not renewed"

    play(tmp_path, scenario)


def test_a_site_may_have_a_long_name_in_any_script(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        name = "Fürth-" + "ü" * 60
        identity = identity_of(here.config(name, join_secret=here.invite(name)))
        assert identity is not None
        await identity.renew()
        assert [each.site for each in await here.store.certificates.list_sites()] == [name]

    play(tmp_path, scenario)


def test_a_certificate_that_cannot_be_written_down_is_shown_all_the_same(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        identity = identity_of(here.config("alpha", join_secret=here.invite("alpha")))
        assert identity is not None
        (tmp_path / "alpha" / "site.pem.new").mkdir()  # as where a disk is full
        await identity.renew()
        assert identity.is_valid

    play(tmp_path, scenario)


def test_without_a_certificate_or_with_a_foreign_secret_nobody_is_let_in(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        other = Authority.create(tmp_path / "other", "other", datetime.now(UTC))
        pair = other.issue_server(["x"], datetime.now(UTC))
        for shown in (
            grpc.ssl_channel_credentials(here.authority.pem),
            grpc.ssl_channel_credentials(here.authority.pem, pair.key, pair.chain),
        ):
            code, _ = await joining_as(None, here.gateways[0], shown)
            assert code is grpc.StatusCode.UNAVAILABLE  # TLS itself refuses
        now = int(time.time())
        forged = invitation.sign(
            invitation.Invitation("alpha", now, now + 99), other.secret(invitation.PURPOSE)
        )
        identity = identity_of(here.config("alpha", join_secret=forged))
        assert identity is not None
        with pytest.raises(LinkLost, match="UNAUTHENTICATED, the join secret is missing or wrong"):
            await identity.renew()
        assert await here.store.certificates.list_sites() == []

    play(tmp_path, scenario)


def test_a_certificate_is_asked_for_as_the_contract_says(tmp_path: Path) -> None:
    """One request gets one answer; of an unauthorized caller no request is read."""
    enrol = pb.DESCRIPTOR.services_by_name["Federation"].methods_by_name["Enrol"]
    assert not (enrol.client_streaming or enrol.server_streaming)
    path = f"/{enrol.containing_service.full_name}/{enrol.name}"
    wrong = (("authorization", "Bearer mico-join-wrong"),)

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def scenario(here: Scene) -> None:
        trust = grpc.ssl_channel_credentials(here.authority.pem)
        async with grpc.aio.secure_channel(here.enrol_at, trust) as channel:
            stub = rpc.FederationStub(channel)
            for asked in (
                stub.Enrol(pb.EnrolRequest(csr=b"no request"), metadata=wrong),
                channel.unary_unary(path)(b"no message", metadata=wrong),
                channel.stream_unary(path)(silent(), metadata=wrong),
            ):
                assert await asked.code() is grpc.StatusCode.UNAUTHENTICATED
                assert await asked.details() == "the join secret is missing or wrong"
            invited = (("authorization", f"Bearer {here.invite('alpha')}"),)
            asked = stub.Enrol(pb.EnrolRequest(csr=b"-" * (MAX_CSR_BYTES + 1)), metadata=invited)
            assert await asked.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"at most {MAX_CSR_BYTES} are read" in await asked.details()

    play(tmp_path, scenario)


def test_machines_of_a_pool_share_a_join_secret_and_are_revoked_one_by_one(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        secret = here.invite("pool-*")
        for name in ("pool-1", "pool-2"):
            identity = identity_of(here.config(name, join_secret=secret))
            assert identity is not None
            await identity.renew()
        assert [row.site for row in await here.store.certificates.list_sites()] == ["pool-1", "pool-2"]
        await here.store.certificates.revoke("pool-1", "lost")
        for name, refusal in (
            ("pool-1", "was revoked"),
            ("other", "is for sites pool-*, not"),
            ("pool-*", "not"),
        ):
            identity = identity_of(
                replace(here.config(name, join_secret=secret), identity=tmp_path / "again")
            )
            assert identity is not None
            with pytest.raises(LinkLost) as caught:
                await identity.renew()
            assert refusal in str(caught.value)
        identity = identity_of(here.config("pool-2", join_secret=secret))
        assert identity is not None
        await identity.renew()

    play(tmp_path, scenario)


def test_a_pool_that_is_revoked_is_cut_off_machine_by_machine(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        config = here.config("pool-1", join_secret=here.invite("pool-*"))
        async with here.site(config):
            await until(lambda: here.state("pool-1") is SiteState.READY, "pool-1 is ready")
            await here.store.certificates.revoke("pool-*", "stolen")
            await until(lambda: here.state("pool-1") is SiteState.DOWN, "pool-1 is cut off")
        identity = identity_of(config)
        assert identity is not None
        refusal = await joining_as(None, here.gateways[0], identity.credentials())
        assert refusal == (grpc.StatusCode.UNAUTHENTICATED, "pool-1: its certificate was revoked")

    play(tmp_path, scenario)


def test_a_revocation_holds_although_the_clock_of_a_gateway_is_ahead(tmp_path: Path) -> None:
    """What it issued is dated later than the revocation by the database's clock."""

    async def scenario(here: Scene) -> None:
        secret, here.now_s = here.invite("alpha"), 60.0
        config = here.config("alpha", join_secret=secret)
        async with here.site(config):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready")
            await here.store.certificates.revoke("alpha", "stolen")
            await until(lambda: here.state("alpha") is SiteState.DOWN, "alpha is cut off")
        identity = identity_of(replace(config, join_secret=""))
        assert identity is not None and identity.is_valid
        with pytest.raises(LinkLost, match="its certificate was revoked"):
            await identity.renew()
        here.now_s += 2.0  # an invitation of now is a new one
        async with here.site(replace(config, join_secret=here.invite("alpha"))):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is back")

    play(tmp_path, scenario)


def test_a_gateway_whose_clock_is_behind_issues_nothing_that_is_void(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        here.now_s = 2.0
        secret = here.invite("alpha")
        await here.store.certificates.revoke("alpha", "stolen")
        here.now_s = -60.0
        async with here.site(here.config("alpha", join_secret=secret)):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is back")

    play(tmp_path, scenario)


def test_who_is_revoked_while_it_renews_gets_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(here: Scene) -> None:
        identity = identity_of(here.config("alpha", join_secret=here.invite("alpha")))
        assert identity is not None
        await identity.renew()
        issue = Certificates.issue

        async def revoked_before(self: Certificates, site: str, csr: bytes, *, renewal: bool) -> bytes:
            await here.store.certificates.revoke(site, "stolen")
            return await issue(self, site, csr, renewal=renewal)

        monkeypatch.setattr(Certificates, "issue", revoked_before)
        with pytest.raises(LinkLost, match="its certificate was revoked"):
            await identity.renew()

    play(tmp_path, scenario)


def test_who_was_revoked_elsewhere_a_moment_ago_gets_nothing_newer(tmp_path: Path) -> None:
    """Even before this replica's next refresh from the database."""

    async def scenario(here: Scene) -> None:
        secrets = {name: here.invite(name) for name in ("alpha", "beta")}
        alpha = identity_of(here.config("alpha", join_secret=secrets["alpha"]))
        beta = identity_of(here.config("beta", join_secret=secrets["beta"]))
        assert alpha is not None and beta is not None
        await alpha.renew()
        url = f"sqlite:///{tmp_path / 'mico.db'}"
        async with open_store(url, tmp_path / "elsewhere", serving=False) as elsewhere:
            for name in secrets:
                await elsewhere.certificates.revoke(name, "stolen")
        with pytest.raises(LinkLost, match="its certificate was revoked"):
            await alpha.renew()
        with pytest.raises(LinkLost, match="the join secret was revoked"):
            await beta.renew()

    play(tmp_path, scenario)


def test_who_fails_too_often_is_told_only_that(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        here.federation._site_auth.login_limiter = LoginLimiter(lambda: 0.0)
        identity = identity_of(here.config("alpha", join_secret="mico-join-wrong"))
        assert identity is not None
        reasons = []
        for _ in range(int(MAX_FAILURES) + 2):
            with pytest.raises(LinkLost) as caught:
                await identity.renew()
            reasons.append("RESOURCE_EXHAUSTED" in str(caught.value))
        assert reasons == [False] * int(MAX_FAILURES) + [True] * 2
        identity = identity_of(here.config("alpha", join_secret=here.invite("alpha")))
        assert identity is not None
        await identity.renew()  # who can say who it is is let in all the same

    play(tmp_path, scenario)


def test_a_token_gets_no_name_that_has_or_had_a_certificate(tmp_path: Path) -> None:
    async def scenario(here: Scene) -> None:
        by_token = grpc.ssl_channel_credentials(here.authority.pem)
        async with here.site(here.config("alpha", join_secret=here.invite("alpha"))):
            await until(lambda: here.state("alpha") is SiteState.READY, "alpha is ready")
        await until(lambda: here.state("alpha") is SiteState.DOWN, "alpha is away")
        for _ in range(2):
            code, why = await joining_as("alpha", here.enrol_at, by_token, TOKEN)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "site alpha has a certificate" in why
            await here.store.certificates.revoke("alpha", "lost")
            await here.store.certificates.refresh()
        free = here.config("beta", identity=None, enrol_at="", token=TOKEN, gateways=(here.enrol_at,))
        async with here.site(free):
            await until(lambda: here.state("beta") is SiteState.READY, "beta is ready")

    play(tmp_path, scenario)


async def joining_as(
    site: str | None, address: str, credentials: Any, token: str = ""
) -> tuple[grpc.StatusCode, str]:
    """Return how the gateway refuses a Hello, or with None how it refuses a client that has sent nothing yet.

    A Hello that is not read may fail as it is written, and then gRPC forgets what the gateway said.
    """
    async with grpc.aio.secure_channel(address, credentials) as channel:
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        call = rpc.FederationStub(channel).Join(metadata=metadata)
        if site is not None:
            model = pb.Model(id="m", context_tokens=9)
            hello = pb.Hello(
                protocol=1, site=site, boot_id="b", models=[model], slots=1, kv_capacity_tokens=9
            )
            await call.write(pb.SiteMessage(hello=hello))
        return await call.code(), await call.details()
