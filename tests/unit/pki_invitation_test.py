"""Join secrets are valid for one name and one time; of a certificate request only the key is used."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from gateway.security.pki import invitation
from gateway.security.pki.authority import MAX_CSR_BYTES, SITE_LIFE, Authority, PkiError, read_site
from gateway.security.pki.invitation import Invitation

KEY = b"k" * 32
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
names = st.text(min_size=1, max_size=200).filter(str.isprintable)


@given(site=names, at=st.integers(0, 2**40), days=st.integers(1, 10_000))
def test_a_join_secret_says_who_and_until_when(site: str, at: int, days: int) -> None:
    made = Invitation(site, at, at + days)
    secret = invitation.sign(made, KEY)
    assert invitation.verify(secret, KEY, at) == made
    with pytest.raises(PkiError, match="no longer valid"):
        invitation.verify(secret, KEY, at + days)
    with pytest.raises(PkiError, match="missing or wrong"):
        invitation.verify(secret, b"another key", at)


@given(data=st.data())
def test_no_other_secret_is_taken_for_it(data: st.DataObject) -> None:
    secret = invitation.sign(Invitation("alpha", 1, 99), KEY)
    place = data.draw(st.integers(0, len(secret) - 2))  # the last letter holds bits that are not read
    letter = data.draw(st.characters(codec="latin-1").filter(lambda letter: letter != secret[place]))
    spoilt = secret[:place] + letter + secret[place + 1 :]
    with pytest.raises(PkiError) as caught:
        invitation.verify(spoilt, KEY, 1)
    assert spoilt not in str(caught.value)


@given(junk=st.text())
def test_junk_is_no_join_secret(junk: str) -> None:
    with pytest.raises(PkiError, match="missing or wrong"):
        invitation.verify(junk, KEY, 1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("pki"), "test", NOW)


def csr(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, name: str = "somebody") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    other = x509.SubjectAlternativeName([x509.UniformResourceIdentifier("spiffe://mico/site/other")])
    builder = (
        x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(other, critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("site", ["alpha", "eu/1 ü", "x" * 200])
def test_a_certificate_names_the_site_whatever_was_asked_for(authority: Authority, site: str) -> None:
    issued = authority.issue_site(site, csr(ec.generate_private_key(ec.SECP256R1())), NOW)
    found = read_site(issued.pem)
    assert found == issued.certificate
    assert (found.site, found.issued_at) == (site, NOW.timestamp())
    assert found.expires_at == (NOW + SITE_LIFE).timestamp()
    extensions = x509.load_pem_x509_certificate(issued.pem).extensions
    purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert [purpose.dotted_string for purpose in purposes] == ["1.3.6.1.5.5.7.3.2"]  # clients only


def test_bad_requests_are_refused_with_the_reason(authority: Authority) -> None:
    good = csr(ec.generate_private_key(ec.SECP256R1()))
    lines = good.decode().splitlines()
    body = bytearray("".join(lines[1:-1]).encode())
    body[-8] ^= 1
    for request, reason in (
        (b"", "can't be read"),
        (b"\xff" * (MAX_CSR_BYTES + 1), "at most"),
        (csr(rsa.generate_private_key(65537, 1024)), "RSA of 2048 bits"),
    ):
        with pytest.raises(PkiError, match=reason):
            authority.issue_site("alpha", request, NOW)
    spoilt = b"\n".join([lines[0].encode(), bytes(body), lines[-1].encode()])
    with pytest.raises(PkiError, match=r"signed by its own key|can't be read"):
        authority.issue_site("alpha", spoilt, NOW)


def test_an_authority_is_made_once_and_keeps_its_key_to_itself(tmp_path: Path) -> None:
    made = Authority.create(tmp_path / "pki", "test", NOW)
    assert (tmp_path / "pki" / "ca-key.pem").stat().st_mode & 0o777 == 0o600
    assert Authority.open(tmp_path / "pki").secret(b"x") == made.secret(b"x") != made.secret(b"y")
    with pytest.raises(PkiError, match="holds an authority already"):
        Authority.create(tmp_path / "pki", "test", NOW)
    with pytest.raises(PkiError, match="`mico pki init` makes one"):
        Authority.open(tmp_path / "nothing")
    Authority.create(tmp_path / "other", "test", NOW)
    (tmp_path / "other" / "ca-key.pem").replace(tmp_path / "pki" / "ca-key.pem")
    with pytest.raises(PkiError, match="is not the key of"):
        Authority.open(tmp_path / "pki")


def test_a_server_certificate_is_no_certificate_of_a_site(authority: Authority) -> None:
    pair = authority.issue_server(["gateway.example.com", "::1"], NOW)
    with pytest.raises(PkiError, match="not the certificate of a site"):
        read_site(pair.chain)
