"""The environment of a Ray that this user starts on loopback: no other user can join it or receive its token.

Ray's processes send the cluster's token with every call. When one of them ends, as workers often do, another user can
listen at its port and receive the calls of the others. With TLS they send nothing to a process without the private key.
"""

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ray")])
_ADDRESS = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
# A certificate that ended would stop Ray. The key exists only as long as this Ray.
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(2200, 1, 1)


def loopback_environment(folder: str) -> dict[str, str]:
    """Create a key and its certificate in a private folder. Return the variables that make Ray's processes use them.

    Ray reads most of them when it is imported: later changes have no effect in that process.
    """
    key, certificate = Path(folder, "tls.key"), Path(folder, "tls.crt")
    made = ec.generate_private_key(ec.SECP256R1())
    _write(
        key,
        made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    _write(certificate, _sign(made).public_bytes(serialization.Encoding.PEM))
    return {
        "RAY_AUTH_MODE": "token",
        # Otherwise, Ray on Linux replaces 127.0.0.1 with the machine's external address, and listens on all addresses.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_SERVER_CERT": str(certificate),
        # Servers, too, accept only clients with this certificate.
        "RAY_TLS_CA_CERT": str(certificate),
    }


def _sign(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.SubjectAlternativeName([_ADDRESS]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )


def _write(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
