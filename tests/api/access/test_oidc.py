"""OIDC tokens of a real local issuer: a valid token has the roles of its groups, others are unauthorized."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import httpx
import jwt
import pytest
from fastapi.testclient import TestClient

from service.adapters.oidc import OidcVerifier
from service.app import create_app
from service.config.settings import Settings
from service.domain.access.oidc_claims import TokenRules
from service.domain.access.rate_limit import Rate
from service.domain.access.roles import OPERATOR, Role
from service.errors import IssuerUnavailable
from service.use_cases.access.access import Tokens
from tests.support.fakes.service import KEY, Clock, FakeService, spec_body
from tests.support.servers.issuer import AUDIENCE, Issuer, ec_key, issuer, public_pem, rsa_key
from tests.support.waiting import wait_for

GROUPS = {"nlp-team": {"nlp": Role.EDITOR}, "all-staff": {"nlp": Role.VIEWER, "default": Role.VIEWER}}


@pytest.fixture
def idp() -> Iterator[Issuer]:
    with issuer() as found:
        yield found


class TokenService:
    """A service that accepts the tokens of an issuer."""

    def __init__(self, root: Path, idp: Issuer) -> None:
        self.clock = Clock()
        self.verifier = OidcVerifier(idp.url, AUDIENCE, clock=self.clock)
        self.service = FakeService(root, tokens=Tokens(self.verifier, TokenRules("groups", GROUPS)))
        self.client = TestClient(self.service.app(), base_url="http://127.0.0.1")

    def send(self, secret: str, path: str = "/me") -> Any:
        """Send a GET request with `secret` and return the answer."""
        return self.client.get(path, headers={"authorization": f"Bearer {secret}"})

    def code(self, secret: str) -> tuple[int, str | None]:
        """Return the status and the problem code of the answer to `secret`."""
        answer = self.send(secret)
        return answer.status_code, answer.json().get("code")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens wait for the issuer, however busy this machine is."""
    monkeypatch.setattr("service.adapters.oidc._WAIT", 60.0)


@pytest.fixture
def api(tmp_path: Path, idp: Issuer) -> TokenService:
    return TokenService(tmp_path, idp)


def test_token_has_roles_of_its_groups_and_its_subject_is_audited(api: TokenService, idp: Issuer) -> None:
    sub = "repo:acme/" + "very-long-" * 20
    token = idp.token(sub=sub, email="alice@acme.example", groups=["all-staff", "nlp-team", "unknown-group", 7])
    assert api.send(token).json() == {
        "id": f"oidc:{sub}",
        "name": "alice@acme.example",
        "roles": {"nlp": "editor", "default": "viewer"},
    }
    headers = {"authorization": f"Bearer {token}", "idempotency-key": "k" * 255}
    sent = [api.client.post("/jobs", content=spec_body(project="nlp"), headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [201, 200]
    (deed,) = api.send(KEY, "/audit").json()["data"]
    assert (deed["key_id"], deed["key_name"], deed["action"]) == (f"oidc:{sub}", "alice@acme.example", "job.submit")
    assert idp.calls == ["/.well-known/openid-configuration", "/keys"], "the keys are fetched once for all tokens"


def test_idempotency_key_does_not_return_a_job_after_leaving_the_group(api: TokenService, idp: Issuer) -> None:
    sent = [
        api.client.post(
            "/jobs",
            content=spec_body(project="nlp"),
            headers={"authorization": f"Bearer {idp.token(groups=groups)}", "idempotency-key": "k"},
        )
        for groups in ("nlp-team", "nlp-team", "all-staff", None)
    ]
    assert [answer.status_code for answer in sent] == [201, 200, 403, 403]
    assert not any(sent[0].json()["id"] in answer.text for answer in sent[2:])


def test_token_submits_only_to_projects_of_its_groups(api: TokenService, idp: Issuer) -> None:
    mine = {"authorization": f"Bearer {idp.token(groups='nlp-team')}"}
    sent = [
        api.client.post("/jobs", content=spec_body(project=project), headers=mine) for project in ("nlp", "default")
    ]
    assert [answer.status_code for answer in sent] == [201, 403]


def test_token_without_groups_has_no_roles(api: TokenService, idp: Issuer) -> None:
    for groups in (None, [], "unknown-group", {"a": "b"}, ["unknown-group"]):
        token = idp.token(groups=groups)
        assert api.send(token).json() == {"id": "oidc:alice-1", "name": "alice-1", "roles": {}}
        assert api.send(token, "/jobs").json()["data"] == []
        headers = {"authorization": f"Bearer {token}"}
        assert api.client.post("/jobs", content=spec_body(), headers=headers).status_code == 403


def test_audience_list_and_elliptic_curve_signature_are_accepted(api: TokenService, idp: Issuer) -> None:
    idp.keys["curve"] = ec_key("curve")
    assert api.code(idp.token(kid="curve", aud=["other", AUDIENCE])) == (200, None)


def segments(*parts: Any) -> str:
    """Encode parts of a token as base64url JSON."""
    return ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=").decode() for one in parts)


def signed_with_the_public_key(idp: Issuer) -> str:
    """Return a token that a library accepts if it trusts the algorithm in the header."""
    claims = jwt.decode(idp.token(), options={"verify_signature": False})
    signed = segments({"alg": "HS256", "kid": "first", "typ": "JWT"}, claims)
    digest = hmac.digest(public_pem(idp.keys["first"]), signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def unsigned(idp: Issuer) -> str:
    """Return an unsigned token with the algorithm `none`."""
    claims = jwt.decode(idp.token(), options={"verify_signature": False})
    return f"{segments({'alg': 'none', 'kid': 'first'}, claims)}."


def test_invalid_token_is_unauthorized(api: TokenService, idp: Issuer) -> None:
    now, sound = time.time(), idp.token()
    head, _, signature = sound.split(".")
    wrong = {
        "expired": idp.token(exp=now - 60),
        "not yet valid": idp.token(nbf=now + 3600),
        "for another audience": idp.token(aud="other"),
        "without an audience": idp.token(aud=None),
        "of another issuer": idp.token(iss="https://other.example"),
        "without an expiry": idp.token(exp=None),
        "with an expiry beyond all floats": idp.token(exp=int("9" * 400)),
        "without a subject": idp.token(sub=None),
        "with an empty subject": idp.token(sub=""),
        "with a subject that is too long": idp.token(sub="x" * 256),
        "with a NUL in its subject": idp.token(sub="a\0b"),
        "with the signature of another key": idp.token(key=rsa_key("another")),
        "with other claims": f"{head}.{segments(jwt.decode(sound, options={'verify_signature': False}))}.{signature}",
        "unsigned": unsigned(idp),
        "signed with the public key": signed_with_the_public_key(idp),
        "of an unknown key": idp.token(kid="unknown", key=rsa_key("another")),
        "without a key id": jwt.encode({"sub": "x"}, rsa_key("first"), "RS256"),
        "rubbish": "a.b.c",
        "empty": "..",
    }
    assert {why: api.code(token) for why, token in wrong.items()} == dict.fromkeys(wrong, (401, "unauthorized"))
    assert api.code(sound) == (200, None)
    assert all(token not in api.send(token).text for token in wrong.values())


def test_small_clock_difference_is_accepted(api: TokenService, idp: Issuer) -> None:
    now = time.time()
    assert api.code(idp.token(exp=now - 5, nbf=now + 5)) == (200, None)


def test_new_key_is_fetched_and_unknown_key_is_not_fetched_each_time(api: TokenService, idp: Issuer) -> None:
    assert api.code(idp.token()) == (200, None)
    idp.keys = {"second": rsa_key("second")}
    stranger = idp.token(kid="unknown", key=rsa_key("another"))
    for _ in range(5):
        assert api.code(stranger) == (401, "unauthorized")
    assert len(idp.calls) == 2
    api.clock.now += 11
    assert api.code(idp.token(kid="second")) == (200, None)
    assert len(idp.calls) == 4
    old = idp.token(kid="first", key=rsa_key("first"))
    assert api.code(old) == (401, "unauthorized"), "a removed key is rejected"


@pytest.mark.parametrize("fault", ["down", "redirecting", "another", "endless", "insecure"])
def test_unavailable_issuer_affects_only_tokens(api: TokenService, idp: Issuer, fault: str) -> None:
    idp.status = {"down": 503, "redirecting": 302}.get(fault, 200)
    idp.called = "https://other.example" if fault == "another" else None
    idp.padding = 1 << 20 if fault == "endless" else 0
    idp.jwks_url = "http://192.0.2.1/keys" if fault == "insecure" else idp.jwks_url
    token = idp.token()
    for _ in range(3):
        answer = api.send(token)
        assert (answer.status_code, answer.json()["code"]) == (503, "issuer_unavailable")
        assert 1 <= int(answer.headers["retry-after"]) <= 11
    assert len(idp.calls) == 1, "the issuer is not called again at once"
    assert api.code(KEY) == (200, None)
    idp.status, idp.called, idp.padding, idp.jwks_url = 200, None, 0, f"{idp.url}/keys"
    api.clock.now += int(answer.headers["retry-after"])
    assert api.code(token) == (200, None)


def test_keys_of_an_unavailable_issuer_are_used_for_an_hour(api: TokenService, idp: Issuer) -> None:
    token = idp.token()
    assert api.code(token) == (200, None)
    idp.status = 503
    api.clock.now += 3500
    assert api.code(token) == (200, None)
    wait_for(lambda: len(idp.calls) == 3, "the fetch in another thread")
    api.clock.now += 200
    assert api.code(token) == (503, "issuer_unavailable")


def test_slow_issuer_times_out(api: TokenService, idp: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.adapters.oidc._LIMIT", 0.3)
    idp.released.clear()
    assert api.code(idp.token()) == (503, "issuer_unavailable")
    assert api.code(KEY) == (200, None)


def test_caller_with_a_key_does_not_wait_for_the_issuer(
    api: TokenService, idp: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.adapters.oidc._LIMIT", 60.0)
    idp.released.clear()
    _, secret = api.service.access.create(OPERATOR, "bob", {"nlp": Role.VIEWER}, None)
    found = list[int]()

    async def call(client: httpx.AsyncClient, secret: str) -> None:
        found.append((await client.get("/me", headers={"authorization": f"Bearer {secret}"})).status_code)

    async def run_all() -> None:
        transport = httpx.ASGITransport(api.service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tokens:
                    # More requests than the service has threads.
                    for _ in range(60):
                        tokens.start_soon(call, client, idp.token())
                    while not idp.calls:
                        await anyio.sleep(0.01)
                    await call(client, secret)
                    assert found == [200], "the key is accepted while all tokens wait"
                    idp.released.set()

    anyio.run(run_all)
    assert found == [200] * 61
    assert len(idp.calls) == 2


def test_token_of_a_known_key_does_not_wait_for_a_slow_issuer(
    api: TokenService, idp: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = idp.token()
    assert api.code(token) == (200, None)
    monkeypatch.setattr("service.adapters.oidc._LIMIT", 60.0)
    monkeypatch.setattr("service.adapters.oidc._WAIT", 2.0)
    idp.released.clear()
    # Its keys are due, and strangers send tokens of unknown keys.
    api.clock.now += 400
    strangers = [idp.token(kid=f"unknown-{number}", key=rsa_key("another")) for number in range(20)]
    with ThreadPoolExecutor(len(strangers)) as pool:
        began = time.monotonic()
        sent = [pool.submit(api.verifier.verify, one) for one in strangers]
        assert api.code(token) == (200, None)
        assert time.monotonic() - began < 2.0
        refused = [type(one.exception()) for one in sent]
    assert refused == [IssuerUnavailable] * len(strangers)
    idp.released.set()


def test_unknown_key_is_not_fetched_again_for_half_a_minute(api: TokenService, idp: Issuer) -> None:
    stranger = idp.token(kid="unknown", key=rsa_key("another"))
    for _ in range(3):
        assert api.code(stranger) == (401, "unauthorized")
        api.clock.now += 11
    assert len(idp.calls) == 2
    api.clock.now += 1
    assert api.code(stranger) == (401, "unauthorized")
    assert len(idp.calls) == 4


def test_token_without_a_configured_issuer_is_unauthorized(tmp_path: Path, idp: Issuer) -> None:
    client = FakeService(tmp_path).client(authorization=f"Bearer {idp.token()}")
    answer = client.get("/me")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert "TRAINSHED_OIDC_ISSUER" in answer.json()["detail"]


def test_settings_configure_issuer_and_rate_limits(tmp_path: Path, idp: Issuer) -> None:
    settings = Settings(
        home=tmp_path,
        ray_address="http://127.0.0.1:9",
        oidc_issuer=idp.url,
        oidc_audience=AUDIENCE,
        oidc_groups_claim="teams",
        oidc_groups=GROUPS,
        reads_per_key=Rate(2, "hour"),
    )
    mine = {"authorization": f"Bearer {idp.token(teams=['nlp-team'])}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1", headers=mine) as client:
        found = [client.get("/me") for _ in range(3)]
    assert [answer.status_code for answer in found] == [200, 200, 429]
    assert found[0].json()["roles"] == {"nlp": "editor"}
    assert 3590 < int(found[2].headers["retry-after"]) <= 3600


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"oidc_issuer": "http://issuer.example"}, "https://"),
        ({"oidc_issuer": "https://issuer.example"}, "TRAINSHED_OIDC_AUDIENCE"),
        ({"oidc_issuer": "https://issuer.example", "oidc_audience": "x"}, "TRAINSHED_OIDC_GROUPS"),
        ({"oidc_groups": {"a": {"nlp": "owner"}}}, "viewer"),
    ],
)
def test_incomplete_or_insecure_oidc_settings_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)
