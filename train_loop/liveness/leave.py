"""The request to save and to leave a head or host that ends as planned, which is not a failure of the job."""

from train_loop.run_dir import RunDir, Stop


def ask_to_leave(run_dir: RunDir, attempt: int, *, reason: str, deadline: float | None = None) -> None:
    """Ask an attempt to save and end. A request of the service stays, and gets the reason.

    A request to a later attempt stays unchanged: the service has given this attempt up.
    """
    stop = run_dir.stop()
    if stop is not None and (stop.attempt or attempt) > attempt:
        return
    if stop is None or (stop.attempt or attempt) < attempt:
        run_dir.write_stop(Stop(mode="pause", deadline=deadline, attempt=attempt, reason=reason))
    elif stop.reason is None:
        run_dir.write_stop(stop.model_copy(update={"reason": reason}))
