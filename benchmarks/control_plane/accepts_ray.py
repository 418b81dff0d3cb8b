"""Job submission through Ray's JobSubmissionClient, with memory per job.

Run as `python -m benchmarks.control_plane.accepts_ray OUT COUNT`.
"""

import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Set before the import of Ray, which reads it.
os.environ["RAY_AUTH_MODE"] = "disabled"

import psutil
import ray
from ray.job_submission import JobSubmissionClient

from benchmarks.control_plane.accepts_run import CONNECTIONS


def main() -> None:
    """Submit sleeping jobs with the same concurrency as the other programs, and measure their supervisors' memory."""
    out, count = Path(sys.argv[1]), int(sys.argv[2])
    context = ray.init(num_cpus=2, include_dashboard=True, logging_level=logging.WARNING)
    client = JobSubmissionClient(f"http://{context.dashboard_url}")
    client.submit_job(entrypoint="true")
    began = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        ids = list(pool.map(lambda _: client.submit_job(entrypoint="sleep 600"), range(count)))
    seconds = time.perf_counter() - began
    out.write_text(json.dumps({"seconds": seconds, "ids": ids, "supervisor_bytes": supervisors()}))


def supervisors() -> list[int]:
    """Return the USS memory of each supervisor, 5 s after the submission."""
    time.sleep(5)
    # Use the command lines read here: other processes may exit meanwhile.
    everybody = psutil.process_iter(["cmdline"])
    found = [process for process in everybody if "JobSupervisor" in " ".join(process.info["cmdline"] or ())]
    return [process.memory_full_info().uss for process in found]


if __name__ == "__main__":
    main()
