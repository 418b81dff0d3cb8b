"""The environment of an embedded Ray: no secret of the service, and the credentials that jobs need."""

import pytest

from service.adapters.ray.environment import environment_of_jobs

SERVICE = {
    "TRAINSHED_SECRET_KEY": "k",
    "TRAINSHED_SECRET_KEY_FILE": "/run/secrets/key",
    "TRAINSHED_ADMIN_KEY_FILE": "/run/secrets/admin",
    "TRAINSHED_DATABASE_URL": "postgresql://db/jobs",
    "TRAINSHED_KEY": "k",
    "trainshed_database_url": "postgresql://db/jobs",
    "PGPASSWORD": "p",
    "PGPASSFILE": "/run/secrets/pgpass",
    "PGSERVICEFILE": "/run/secrets/pgservice",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=k",
    "RAY_AUTH_TOKEN": "t",
    "DATABASE_URL": "postgresql://shed:hush@db/jobs",
    "SMTP_PASSWORD": "p",
    "GITHUB_TOKEN": "t",
    "DB_PASSWORD_FILE": "/run/secrets/db",
    "GITHUB_PAT": "p",
    "LDAP_BINDPW": "p",
    "FERNET_KEYS": "k,l",
    "SERVICE_JWT": "j",
    "PIP_INDEX_URL": "https://ghp_abcdefghijklmnopqrst@index/simple",
    "REPLICA": "postgresql://shed:with/slash@db/jobs",
    "CONNECTION": "host=db password=p",
}
NEEDED = {
    "PATH": "/bin",
    "HOME": "/home/a",
    "LANG": "C.UTF-8",
    "CUDA_VISIBLE_DEVICES": "0",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "MAX_TOKENS": "4096",
    "TOKENIZERS_PARALLELISM": "false",
    "HTTPS_PROXY": "http://user:password@proxy:3128",
    "TRAINSHED_TEST_FORKS": "1",
    "PYTHONPATH": "/src",
    "LD_LIBRARY_PATH": "/lib",
    "SORT_KEYS": "name",
    "HF_ENDPOINT": "http://mirror:8080/hf",
}
PROVIDERS = [
    ({"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_PROFILE": "p", "FSSPEC_S3_SECRET": "s"}, "s3://b/"),
    ({"GOOGLE_APPLICATION_CREDENTIALS": "/run/secrets/g"}, "gs://b/"),
    ({"AZURE_STORAGE_CONNECTION_STRING": "c", "FSSPEC_ABFSS": "{}"}, "abfss://c@a/"),
]
TRACKERS = [({"WANDB_API_KEY": "k"}, "wandb"), ({"MLFLOW_TRACKING_PASSWORD": "p", "DATABRICKS_TOKEN": "t"}, "mlflow")]


def test_secrets_of_the_service_do_not_reach_jobs() -> None:
    roots, sinks = ["s3://b/", "gs://b/", "abfs://b/"], ["wandb", "mlflow", "tensorboard"]
    assert environment_of_jobs(SERVICE | NEEDED, roots=roots, sinks=sinks) == NEEDED


@pytest.mark.parametrize(("variables", "root"), PROVIDERS)
def test_storage_credentials_reach_jobs_only_with_a_root_there(variables: dict[str, str], root: str) -> None:
    assert environment_of_jobs(variables, roots=["file:///runs", root], sinks=()) == variables
    others = [other for _, other in PROVIDERS if other != root]
    assert environment_of_jobs(variables, roots=["file:///runs", "/data", *others], sinks=()) == {}


@pytest.mark.parametrize(("variables", "sink"), TRACKERS)
def test_tracker_credentials_reach_jobs_only_with_its_sink(variables: dict[str, str], sink: str) -> None:
    assert environment_of_jobs(variables, roots=(), sinks=[sink]) == variables
    assert environment_of_jobs(variables, roots=(), sinks=["tensorboard"]) == {}
