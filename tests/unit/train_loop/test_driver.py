"""What the driver asks of Ray for a spec."""

import pytest

from tests.support.specs import spec
from train_loop import driver, rank, spare
from train_loop.spare import task_environment


@pytest.mark.parametrize(("wanted", "counts"), [(True, [2, 1]), (False, [0, 0])])
def test_a_run_says_whether_it_wants_them(monkeypatch: pytest.MonkeyPatch, wanted: bool, counts: list[int]) -> None:
    job = spec(failure={"spare_workers": wanted})
    assert [rank._spares(job, number) for number in (0, 1)] == counts
    variables = driver._environment(job).get("env_vars", {})
    assert (spare._HOOK in variables) == wanted
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = task_environment()
    # Its tasks run in another environment, without the hook.
    assert (environment["env_vars"][spare._HOOK] if environment else None) == ("" if wanted else None)
