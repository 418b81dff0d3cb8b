"""Tokens of a real issuer on this machine: those in order open what their groups may, and no others anything."""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
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
from service.domain.access.roles import Role
from service.use_cases.access.access import Tokens
from tests.support.issuer import AUDIENCE, Issuer, ec_key, issuer, public_pem, rsa_key
from tests.support.service import KEY, Clock, FakeService, spec_body

GROUPS = {"nlp-team": {"nlp": Role.EDITOR}, "everybody": {"nlp": Role.VIEWER, "default": Role.VIEWER}}


@pytest.fixture
def known() -> Iterator[Issuer]:
    with issuer() as found:
        yield found


class Door:
    """A service that takes the tokens of an issuer."""

    def __init__(self, root: Path, known: Issuer) -> None:
        self.clock = Clock()
        verifier = OidcVerifier(known.url, AUDIENCE, clock=self.clock)
        self.service = FakeService(root, tokens=Tokens(verifier, TokenRules("groups", GROUPS)))
        self.client = TestClient(self.service.app(), base_url="http://127.0.0.1")

    def ask(self, secret: str, path: str = "/me") -> Any:
        """What whoever sends this is answered."""
        return self.client.get(path, headers={"authorization": f"Bearer {secret}"})

    def code(self, secret: str) -> tuple[int, str | None]:
        """Its status and code."""
        answer = self.ask(secret)
        return answer.status_code, answer.json().get("code")


@pytest.fixture
def door(tmp_path: Path, known: Issuer) -> Door:
    return Door(tmp_path, known)


def test_token_opens_what_its_groups_may_and_the_audit_log_tells_its_subject(door: Door, known: Issuer) -> None:
    sub = "repo:acme/" + "very-long-" * 20
    token = known.token(sub=sub, email="alice@acme.example", groups=["everybody", "nlp-team", "unheard-of", 7])
    assert door.ask(token).json() == {
        "id": f"oidc:{sub}",
        "name": "alice@acme.example",
        "roles": {"nlp": "editor", "default": "viewer"},
    }
    headers = {"authorization": f"Bearer {token}", "idempotency-key": "k" * 255}
    sent = [door.client.post("/jobs", content=spec_body(project="nlp"), headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in sent] == [201, 200]
    (deed,) = door.ask(KEY, "/audit").json()["data"]
    assert (deed["key_id"], deed["key_name"], deed["action"]) == (f"oidc:{sub}", "alice@acme.example", "job.submit")
    assert known.calls == ["/.well-known/openid-configuration", "/keys"], "once for all of them"


def test_idempotency_key_opens_no_project_that_the_groups_have_left(door: Door, known: Issuer) -> None:
    sent = [
        door.client.post(
            "/jobs",
            content=spec_body(project="nlp"),
            headers={"authorization": f"Bearer {known.token(groups=groups)}", "idempotency-key": "k"},
        )
        for groups in ("nlp-team", "nlp-team", "everybody", None)
    ]
    assert [answer.status_code for answer in sent] == [201, 200, 403, 403]
    assert not any(sent[0].json()["id"] in answer.text for answer in sent[2:])


def test_token_submits_where_its_groups_may_and_nowhere_else(door: Door, known: Issuer) -> None:
    mine = {"authorization": f"Bearer {known.token(groups='nlp-team')}"}
    sent = [
        door.client.post("/jobs", content=spec_body(project=project), headers=mine) for project in ("nlp", "default")
    ]
    assert [answer.status_code for answer in sent] == [201, 403]


def test_token_without_groups_is_somebody_who_may_nothing(door: Door, known: Issuer) -> None:
    for groups in (None, [], "unheard-of", {"a": "b"}, ["unheard-of"]):
        token = known.token(groups=groups)
        assert door.ask(token).json() == {"id": "oidc:alice-1", "name": "alice-1", "roles": {}}
        assert door.ask(token, "/jobs").json()["data"] == []
        headers = {"authorization": f"Bearer {token}"}
        assert door.client.post("/jobs", content=spec_body(), headers=headers).status_code == 403


def test_audience_may_be_one_of_several_and_curves_sign_as_well(door: Door, known: Issuer) -> None:
    known.keys["curve"] = ec_key("curve")
    assert door.code(known.token(kid="curve", aud=["other", AUDIENCE])) == (200, None)


def segments(*parts: Any) -> str:
    """Parts of a token as JSON."""
    return ".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=").decode() for one in parts)


def signed_with_the_public_key(known: Issuer) -> str:
    """What a library that believes the header takes for the issuer's."""
    claims = jwt.decode(known.token(), options={"verify_signature": False})
    signed = segments({"alg": "HS256", "kid": "first", "typ": "JWT"}, claims)
    digest = hmac.digest(public_pem(known.keys["first"]), signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def unsigned(known: Issuer) -> str:
    """A token whose header says that nobody signed it."""
    claims = jwt.decode(known.token(), options={"verify_signature": False})
    return f"{segments({'alg': 'none', 'kid': 'first'}, claims)}."


def test_no_other_token_opens_anything(door: Door, known: Issuer) -> None:
    now, sound = time.time(), known.token()
    head, _, signature = sound.split(".")
    wrong = {
        "expired": known.token(exp=now - 60),
        "not yet valid": known.token(nbf=now + 3600),
        "for somebody else": known.token(aud="other"),
        "for nobody": known.token(aud=None),
        "of somebody else": known.token(iss="https://other.example"),
        "without an end": known.token(exp=None),
        "without a subject": known.token(sub=None),
        "with a subject that is none": known.token(sub=""),
        "with a subject that is too long": known.token(sub="x" * 256),
        "with a subject that no database takes": known.token(sub="a\0b"),
        "with another's signature": known.token(key=rsa_key("another")),
        "with other claims": f"{head}.{segments(jwt.decode(sound, options={'verify_signature': False}))}.{signature}",
        "unsigned": unsigned(known),
        "signed with what everybody knows": signed_with_the_public_key(known),
        "of an unknown key": known.token(kid="unknown", key=rsa_key("another")),
        "of no key": jwt.encode({"sub": "x"}, rsa_key("first"), "RS256"),
        "rubbish": "a.b.c",
        "empty": "..",
    }
    assert {why: door.code(token) for why, token in wrong.items()} == dict.fromkeys(wrong, (401, "unauthorized"))
    assert door.code(sound) == (200, None)
    assert all(token not in door.ask(token).text for token in wrong.values())


def test_clocks_may_differ_a_little(door: Door, known: Issuer) -> None:
    now = time.time()
    assert door.code(known.token(exp=now - 5, nbf=now + 5)) == (200, None)


def test_key_that_is_new_is_asked_for_and_one_that_nobody_has_is_not_asked_for_each_time(
    door: Door, known: Issuer
) -> None:
    assert door.code(known.token()) == (200, None)
    known.keys = {"second": rsa_key("second")}
    stranger = known.token(kid="unknown", key=rsa_key("another"))
    for _ in range(5):
        assert door.code(stranger) == (401, "unauthorized")
    assert len(known.calls) == 2
    door.clock.now += 11
    assert door.code(known.token(kid="second")) == (200, None)
    assert len(known.calls) == 4
    old = known.token(kid="first", key=rsa_key("first"))
    assert door.code(old) == (401, "unauthorized"), "a key that was taken back opens nothing"


@pytest.mark.parametrize("how", ["down", "redirecting", "another", "endless", "insecure"])
def test_issuer_that_does_not_tell_its_keys_stops_tokens_and_nobody_else(door: Door, known: Issuer, how: str) -> None:
    known.status = {"down": 503, "redirecting": 302}.get(how, 200)
    known.called = "https://other.example" if how == "another" else None
    known.padding = 1 << 20 if how == "endless" else 0
    known.jwks_url = "http://192.0.2.1/keys" if how == "insecure" else known.jwks_url
    token = known.token()
    for _ in range(3):
        answer = door.ask(token)
        assert (answer.status_code, answer.json()["code"]) == (503, "issuer_unavailable")
        assert 1 <= int(answer.headers["retry-after"]) <= 11
    assert len(known.calls) == 1, "it is left alone for a while"
    assert door.code(KEY) == (200, None)
    known.status, known.called, known.padding, known.jwks_url = 200, None, 0, f"{known.url}/keys"
    door.clock.now += int(answer.headers["retry-after"])
    assert door.code(token) == (200, None)


def test_keys_of_an_issuer_that_went_down_are_good_for_an_hour(door: Door, known: Issuer) -> None:
    token = known.token()
    assert door.code(token) == (200, None)
    known.status = 503
    door.clock.now += 3500
    assert door.code(token) == (200, None)
    assert len(known.calls) == 3
    door.clock.now += 200
    assert door.code(token) == (503, "issuer_unavailable")


def test_issuer_that_is_slow_is_given_up(door: Door, known: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.adapters.oidc._LIMIT", 0.3)
    known.released.clear()
    assert door.code(known.token()) == (503, "issuer_unavailable")
    assert door.code(KEY) == (200, None)


def test_nobody_with_a_key_waits_for_an_issuer(door: Door, known: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.adapters.oidc._LIMIT", 60.0)
    known.released.clear()
    _, secret = door.service.access.create("bob", {"nlp": Role.VIEWER}, None)
    found = list[int]()

    async def call(client: httpx.AsyncClient, secret: str) -> None:
        found.append((await client.get("/me", headers={"authorization": f"Bearer {secret}"})).status_code)

    async def everybody() -> None:
        transport = httpx.ASGITransport(door.service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tokens:
                    # More than there are threads for all that is asked.
                    for _ in range(60):
                        tokens.start_soon(call, client, known.token())
                    while not known.calls:
                        await anyio.sleep(0.01)
                    await call(client, secret)
                    assert found == [200], "while all others wait"
                    known.released.set()

    anyio.run(everybody)
    assert found == [200] * 61
    assert len(known.calls) == 2


def test_tokens_are_refused_where_no_issuer_is_named(tmp_path: Path, known: Issuer) -> None:
    client = FakeService(tmp_path).client(authorization=f"Bearer {known.token()}")
    answer = client.get("/me")
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert "TRAINSHED_OIDC_ISSUER" in answer.json()["detail"]


def test_settings_name_an_issuer_and_limits(tmp_path: Path, known: Issuer) -> None:
    settings = Settings(
        home=tmp_path,
        ray_address="http://127.0.0.1:9",
        oidc_issuer=known.url,
        oidc_audience=AUDIENCE,
        oidc_groups_claim="teams",
        oidc_groups=GROUPS,
        reads_per_key=Rate(2, "hour"),
    )
    mine = {"authorization": f"Bearer {known.token(teams=['nlp-team'])}"}
    with TestClient(create_app(settings), base_url="http://127.0.0.1", headers=mine) as client:
        found = [client.get("/me") for _ in range(3)]
    assert [answer.status_code for answer in found] == [200, 200, 429]
    assert found[0].json()["roles"] == {"nlp": "editor"}
    assert 3590 < int(found[2].headers["retry-after"]) <= 3600


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"oidc_issuer": "http://issuer.example"}, "https://"),
        ({"oidc_issuer": "https://issuer.example"}, "TRAINSHED_OIDC_AUDIENCE"),
        ({"oidc_issuer": "https://issuer.example", "oidc_audience": "x"}, "TRAINSHED_OIDC_GROUPS"),
        ({"oidc_groups": {"a": {"nlp": "owner"}}}, "viewer"),
    ],
)
def test_settings_that_let_nobody_in_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Settings(**given)
