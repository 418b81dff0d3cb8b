"""Secrets of the environment, masked in logs."""

import subprocess
import sys
from pathlib import Path

import pytest

from train_loop.system.redact import redactor


def test_only_values_of_secret_names_are_masked(tmp_path: Path) -> None:
    environment = {
        "AWS_SECRET_ACCESS_KEY": "/bc/def+ghi",
        "HF_TOKEN": "hf_12345678",
        "DB_PASSWORD": "/bc/def+ghi and more",
        "DATABASE_URL": "postgresql://shed:hush-hush@db/jobs",
        "SMTP_PASS": "letmein",
        "AZURE_STORAGE_KEY": "azure+storage",
        "NPM_AUTHTOKEN": "npm_123456",
        "REPLICA_URL": "postgresql://shed:with/slash@db/jobs",
        "INDEX_URL": "https://ghp_abcdefghijklmnopqrst@index/simple",
        "DATABASE": "host=db user=shed password=in-words dbname=jobs",
        "MIRROR": "http://mirror:8080/pkg/@scope",
        "HOME": "/home/somebody",
        "KEYBOARD": "qwertyuiop",
        "RAY_AUTH_TOKEN_PATH": str(tmp_path),
        "GOOGLE_CREDENTIALS": str(tmp_path),
        "API_KEY": "12345",
        "MAX_TOKENS": "100000",
        "TOKENIZER": "Qwen3-0.6B",
        "SORT_KEY": "timestamp",
    }
    text = "/bc/def+ghi hf_12345678 /bc/def+ghi and more postgresql://shed:hush-hush@db/jobs letmein azure+storage"
    assert redactor(environment)(text) == "*** *** *** postgresql://shed:***@db/jobs *** ***"
    assert redactor(environment)("npm_123456") == "***"
    assert redactor(environment)("with/slash ghp_abcdefghijklmnopqrst in-words") == "*** *** ***"
    harmless = f"http://mirror:8080/pkg/@scope /home/somebody qwertyuiop {tmp_path} 12345 100000 Qwen3-0.6B timestamp"
    assert redactor(environment)(harmless) == harmless


WAYS = ["print(os.environ['MY_SECRET'])", "logging.getLogger('train_loop').info(os.environ['MY_SECRET'])"]


@pytest.mark.parametrize("way", WAYS)
def test_process_log_contains_no_secrets(tmp_path: Path, way: str) -> None:
    code = f"import logging, os, pathlib, train_loop.telemetry.logs as logs; logs.log_to(pathlib.Path('x.log')); {way}"
    environment = {"MY_SECRET": "open sesame", "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    text = (tmp_path / "x.log").read_text()
    assert "***" in text
    assert "sesame" not in text
