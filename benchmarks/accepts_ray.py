"""Jobs that Ray's JobSubmissionClient gets accepted, and what each takes: `-m benchmarks.accepts_ray OUT COUNT`."""

import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Set before Ray is imported, which reads it then.
os.environ["RAY_AUTH_MODE"] = "disabled"

import psutil
import ray
from ray.job_submission import JobSubmissionClient

from benchmarks.accepts_run import CONNECTIONS


def main() -> None:
    """Submit jobs that wait, as many at once as the other programs, and look at their supervisors."""
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
    """Memory of each supervisor that is its own (USS), once they are there."""
    time.sleep(5)
    # What was read once: any other process of the machine may end meanwhile.
    everybody = psutil.process_iter(["cmdline"])
    found = [process for process in everybody if "JobSupervisor" in " ".join(process.info["cmdline"] or ())]
    return [process.memory_full_info().uss for process in found]


if __name__ == "__main__":
    main()
