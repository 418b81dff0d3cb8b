"""A real OpenID Connect issuer on this machine: discovery, keys, and signed tokens."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

AUDIENCE = "trainshed"
Private = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@cache
def rsa_key(name: str) -> rsa.RSAPrivateKey:
    """Return the RSA key of this name, generated once because generation is slow."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@cache
def ec_key(name: str) -> ec.EllipticCurvePrivateKey:
    """Return the elliptic-curve key of this name, generated once."""
    return ec.generate_private_key(ec.SECP256R1())


def public_pem(key: Private) -> bytes:
    """Return the public part of a key as PEM."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


class Issuer:
    """The published documents and answers of the issuer; a test may change them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys: dict[str, Private] = {"first": rsa_key("first")}
        self.calls: list[str] = []
        self.status = 200
        self.called: str | None = None
        self.jwks_url = f"{url}/keys"
        self.padding = 0
        self.released = threading.Event()
        self.released.set()

    def token(self, *, kid: str = "first", key: Private | None = None, **claims: Any) -> str:
        """Return a signed token, valid unless claims make it invalid; None omits a claim."""
        now = time.time()
        sound = {"iss": self.url, "aud": AUDIENCE, "sub": "alice-1", "iat": now, "exp": now + 3600}
        payload = {name: value for name, value in (sound | claims).items() if value is not None}
        signer = key or self.keys[kid]
        return jwt.encode(payload, signer, "RS256" if isinstance(signer, rsa.RSAPrivateKey) else "ES256", {"kid": kid})

    def answer(self, path: str) -> dict[str, Any] | None:
        """Return the document at a path."""
        if path == "/.well-known/openid-configuration":
            return {"issuer": self.called or self.url, "jwks_uri": self.jwks_url, "padding": "x" * self.padding}
        return {"keys": [_published(kid, key) for kid, key in self.keys.items()]} if path == "/keys" else None


def _published(kid: str, key: Private) -> dict[str, Any]:
    kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
    public: Any = key.public_key()
    return {**kind.to_jwk(public, as_dict=True), "kid": kid, "use": "sig"}


@contextmanager
def issuer() -> Iterator[Issuer]:
    """Run an issuer until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.calls.append(self.path)
            found.released.wait(60)
            body = json.dumps(found.answer(self.path)).encode()
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Issuer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield found
    finally:
        found.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
