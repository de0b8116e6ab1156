"""Fixtures of the proxy's tests: a running proxy and fake instances that ping it."""

import datetime
import ipaddress
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

sys.path.insert(0, str(Path(__file__).parent))

from proxy_fakes import Deployment, deployed

from p2pkv_proxy.attempt import Dispatch


def pair(*ways: Dispatch) -> Any:
    """A fixture: a proxy with one P and one D, once for each of these ways to dispatch."""

    @pytest.fixture(params=ways)
    async def made(request: pytest.FixtureRequest) -> AsyncIterator[Deployment]:
        async with deployed(request.param, prefill=1, decode=1) as deployment:
            yield deployment

    return made


either, concurrent, sequential = pair("concurrent", "sequential"), pair("concurrent"), pair("sequential")


@pytest.fixture(params=["concurrent", "sequential"])
def dispatch(request: pytest.FixtureRequest) -> Dispatch:
    return request.param


@pytest.fixture
async def lonely() -> AsyncIterator[Deployment]:
    """A proxy that nobody has pinged yet."""
    async with deployed("concurrent") as deployment:
        yield deployment


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that has signed itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "p2pkv's tests")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("certificate")
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files
