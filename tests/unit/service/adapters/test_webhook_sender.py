"""HTTP sender of webhooks against real receivers that answer, fail, redirect, stay silent or never finish."""

import json
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest
import standardwebhooks

from service.adapters.webhook_sender import WebhookSender, look_up
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import Answer, Message, Webhook
from service.domain.webhooks.ssrf import AllowList
from tests.support.servers.receivers import (
    Act,
    Receiver,
    answer,
    never_answer,
    receiving,
    send_endless_body,
    send_garbage,
    send_slow_headers,
)
from tests.support.waiting import wait_for

SECRET, OLD = "whsec_" + "QUJD" * 10, "whsec_" + "REVG" * 10
LOOPBACK = AllowList.parse(["127.0.0.1"])
MESSAGE = Message("job-1.2", "job.state", "job-1", json.dumps({"type": "job.state", "data": "\u00e4"}), 5.0)


def a_webhook(url: str) -> Webhook:
    return Webhook("hook-1", "nlp", url, tuple(JobState), SECRET, 1.0, "operator")


def send(receiver: Receiver, *, seconds: float = 60.0) -> Answer | None:
    sender = WebhookSender(LOOPBACK, seconds=seconds)
    return sender.send(a_webhook(receiver.url("/hook?a=b")), MESSAGE, now=time.time())


def test_receiver_verifies_signature_with_standardwebhooks() -> None:
    with receiving(answer(204)) as receiver:
        assert send(receiver) == Answer(204)
    (got,) = receiver.got
    assert got.path == "/hook?a=b"
    assert (got.headers["webhook-id"], got.headers["host"]) == ("job-1.2", f"127.0.0.1:{receiver.port}")
    assert got.headers["content-type"] == "application/json"
    assert standardwebhooks.Webhook(SECRET).verify(got.body, got.headers) == json.loads(MESSAGE.body)
    for secret, body in ((OLD, got.body), (SECRET, got.body + " ")):
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(secret).verify(body, got.headers)


def test_rotated_secret_and_previous_secret_verify_until_it_expires() -> None:
    now = time.time()
    with receiving() as receiver:
        for until in (now + 60, now - 60):
            rotated = Webhook(
                "hook-1", "nlp", receiver.url(), (), SECRET, 1.0, "operator", previous_secret=OLD, previous_until=until
            )
            WebhookSender(LOOPBACK).send(rotated, MESSAGE, now=now)
    first, second = receiver.got
    for secret in (SECRET, OLD):
        assert standardwebhooks.Webhook(secret).verify(first.body, first.headers)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(OLD).verify(second.body, second.headers)


@pytest.mark.parametrize(
    ("act", "status", "retry_after", "word"),
    [
        (answer(500), 500, None, "answered 500"),
        (answer(404, retry_after="7"), 404, None, "answered 404"),
        (answer(503, retry_after="7"), 503, 7.0, "answered 503"),
        (answer(410), 410, None, "410 Gone"),
        (send_garbage, None, None, "RemoteProtocolError"),
        (send_endless_body, 200, None, None),
    ],
)
def test_answer_gives_status_retry_after_and_error(
    act: Act, status: int | None, retry_after: float | None, word: str | None
) -> None:
    with receiving(act) as receiver:
        found = send(receiver)
    assert found is not None
    assert (found.status, found.retry_after) == (status, retry_after)
    assert found.received == (word is None)
    assert word is None or word in (found.error or "")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_reported_and_not_followed(status: int) -> None:
    with receiving() as inside, receiving(answer(status, location=inside.url())) as receiver:
        found = send(receiver)
    assert found is not None
    assert found.status == status
    assert "redirects are not followed" in (found.error or "")
    assert inside.got == []
    assert str(inside.port) not in (found.error or ""), "the error does not contain the redirect target"


@pytest.mark.parametrize("act", [never_answer, send_slow_headers])
def test_slow_receiver_times_out(act: Act) -> None:
    with receiving(act) as receiver:
        assert send(receiver, seconds=0.5) == Answer(None, "no answer within 0.5 s")


def test_timeout_includes_the_name_lookup() -> None:
    done = threading.Event()

    def slow(host: str) -> list[str]:
        done.wait(60)
        return ["127.0.0.1"]

    found = WebhookSender(LOOPBACK, look_up=slow, seconds=0.5).send(a_webhook("http://x/"), MESSAGE, now=1.0)
    done.set()
    assert found == Answer(None, "no answer within 0.5 s")


def test_refused_connection_and_unknown_name_are_reported() -> None:
    with receiving() as receiver:
        pass
    found = send(receiver)
    assert found is not None
    assert "ConnectError" in (found.error or "")

    def unknown(host: str) -> list[str]:
        raise OSError("no such name")

    found = WebhookSender(LOOPBACK, look_up=unknown).send(a_webhook("https://x/"), MESSAGE, now=1.0)
    assert found == Answer(None, "OSError: no such name")


def test_invalid_name_is_reported_at_once() -> None:
    def refuse(host: str) -> list[str]:
        raise UnicodeError("label empty or too long")

    found = WebhookSender(LOOPBACK, look_up=refuse, seconds=60.0).send(a_webhook("https://x/"), MESSAGE, now=1.0)
    assert found == Answer(None, "UnicodeError: label empty or too long")


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], []])
def test_name_with_internal_address_is_rejected(addresses: list[str]) -> None:
    with receiving() as receiver:
        webhook = a_webhook(receiver.url(host="hooks.example"))
        found = WebhookSender(AllowList(), look_up=lambda host: addresses).send(webhook, MESSAGE, now=1.0)
    assert found is not None
    assert "hooks.example has an address that is not on the public internet" in (found.error or "")
    assert receiver.got == []


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f000001"])
def test_loopback_in_other_notation_is_rejected(host: str) -> None:
    with receiving() as receiver:
        found = WebhookSender(AllowList()).send(a_webhook(receiver.url(host=host)), MESSAGE, now=1.0)
    assert found is not None
    assert found.status is None
    assert receiver.got == []


def test_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = list[str]()

    def rebinding(host: str) -> list[str]:
        """Return an allowed address on the first call and an internal address afterwards."""
        lookups.append(host)
        return ["127.0.0.1"] if len(lookups) == 1 else ["10.0.0.1"]

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with receiving() as receiver:
        # No resolver knows this name: only a connection to the checked address can work.
        webhook = a_webhook(receiver.url(host="hooks.invalid"))
        assert WebhookSender(LOOPBACK, look_up=rebinding).send(webhook, MESSAGE, now=1.0) == Answer(200)
    assert lookups == ["hooks.invalid"]
    assert receiver.got[0].headers["host"] == f"hooks.invalid:{receiver.port}"


def test_next_address_is_tried_if_the_first_does_not_answer() -> None:
    allowed = AllowList.parse(["127.0.0.0/8"])
    with receiving() as receiver:
        webhook = a_webhook(receiver.url(host="hooks.invalid"))
        sender = WebhookSender(allowed, look_up=lambda host: ["127.0.0.2", "127.0.0.1"])
        assert sender.send(webhook, MESSAGE, now=1.0) == Answer(200)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Create a certificate for hooks.invalid and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=hooks.invalid"
    extension = ["-addext", "subjectAltName=DNS:hooks.invalid", "-keyout", str(key), "-out", str(made)]
    subprocess.run([*command.split(), *extension], check=True, capture_output=True)
    return made, key


def test_tls_verifies_the_name_when_connecting_to_an_address(certificate: tuple[Path, Path]) -> None:
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=certificate[0])
    server.load_cert_chain(*certificate)
    with receiving(tls=server) as receiver:
        for host, trust in (("hooks.invalid", client), ("other.invalid", client), ("hooks.invalid", None)):
            sender = WebhookSender(LOOPBACK, look_up=lambda host: ["127.0.0.1"], tls=trust)
            found = sender.send(a_webhook(receiver.url(host=host, scheme="https")), MESSAGE, now=1.0)
            assert found is not None
            assert found.received == (host == "hooks.invalid" and trust is client)
            assert found.received or "CERTIFICATE_VERIFY_FAILED" in (found.error or "")
    assert len(receiver.got) == 1


def test_close_aborts_in_flight_requests() -> None:
    sender, found = WebhookSender(LOOPBACK, seconds=600.0), list[Answer | None]()
    with receiving(never_answer) as receiver:
        webhook = a_webhook(receiver.url())
        thread = threading.Thread(target=lambda: found.append(sender.send(webhook, MESSAGE, now=1.0)))
        thread.start()
        wait_for(lambda: receiver.got, "the request")
        sender.close()
        thread.join(60)
        assert found == [None]
        assert sender.send(webhook, MESSAGE, now=1.0) is None
    assert len(receiver.got) == 1


def test_look_up_resolves_localhost() -> None:
    assert set(look_up("localhost")) <= {"127.0.0.1", "::1"}
