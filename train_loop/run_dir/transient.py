"""Retryable storage errors, and the timeout of their retries."""

import errno
import os
from pathlib import Path

from train_loop.run_dir.remote import storage_failed
from train_loop.run_dir.root import StorageUnavailable, check_storage

STORAGE_SECONDS_VARIABLE = "TRAINSHED_STORAGE_SECONDS"
_DEFAULT_SECONDS = 300.0
_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENOTCONN", "ENOTDIR", "ETIMEDOUT", "ENXIO", "ENODEV", "EREMOTEIO", "ESHUTDOWN", "ENOLINK"),
        *("EAGAIN", "EBUSY", "EINTR", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EPIPE"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
    )
    if hasattr(errno, name)
}
"""Errors of a file system or network that is unavailable for a while. ENOSPC, EACCES and EROFS need an operator."""
_STATUSES = {408, 425, 429}
_CODES = {"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "ThrottlingException"}
_PERMANENT = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}


def storage_seconds() -> float:
    """Return the timeout in seconds of storage retries: the service passes its setting to drivers and ranks."""
    try:
        return max(float(os.environ.get(STORAGE_SECONDS_VARIABLE, _DEFAULT_SECONDS)), 0.0)
    except ValueError:
        return _DEFAULT_SECONDS


def is_transient(error: BaseException) -> bool:
    """Return whether an error means that storage is unavailable and may come back, so that callers retry."""
    if isinstance(error, StorageUnavailable | TimeoutError | ConnectionError):
        return True
    if isinstance(error, FileExistsError):
        return _file_in_the_way(error)
    if isinstance(error, FileNotFoundError):
        return _root_is_gone(error)
    if isinstance(error, OSError) and (error.errno is not None or type(error).__module__ == "builtins"):
        return error.errno in _ERRNOS
    return storage_failed(error) and _request_may_pass(error)


def _file_in_the_way(error: FileExistsError) -> bool:
    """Return whether a path component is a file instead of a folder. Other existing names are permanent errors."""
    if error.errno != errno.EEXIST or not isinstance(error.filename, str) or error.filename2 is not None:
        return False
    return os.path.lexists(error.filename) and not os.path.isdir(error.filename)


def _root_is_gone(error: FileNotFoundError) -> bool:
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str) and os.path.isabs(name)]
    try:
        for name in names:
            check_storage(Path(name))
    except StorageUnavailable:
        return True
    except OSError as other:
        return is_transient(other) if not isinstance(other, FileNotFoundError) else False
    return False


def _request_may_pass(error: BaseException) -> bool:
    """Return whether a request to object storage failed on the network or in the server, and may be retried."""
    if type(error).__name__ in _PERMANENT:
        return False
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = str(response.get("Error", {}).get("Code", ""))
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return code in _CODES or status is None or status >= 500 or status in _STATUSES
    status = getattr(error, "status", None) or getattr(error, "code", None) or getattr(error, "status_code", None)
    return not isinstance(status, int) or status >= 500 or status in _STATUSES
