"""Little room where loader workers hand over batches, as in a container (CASES.md row 94)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from acceptance.product import autotune, write_workload

pytestmark = pytest.mark.slow

LITTLE_ROOM = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"',
    "sh",
)
"""Runs a command with 4 MiB of shared memory; the machine's own stays as it is."""

LARGE_SAMPLES = """
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(128, 1024), 0  # half a MiB

class Net(Net):
    def forward(self, inputs):
        return super().forward(inputs[:, 0, :16])

def loader_fn(batch_size=2, num_workers=0, prefetch_factor=None):
    return DataLoader(
        Images(), batch_size, num_workers=num_workers, prefetch_factor=prefetch_factor
    )
"""


def can_have_little_room() -> bool:
    """Whether this machine lets us give a command a shared memory of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*LITTLE_ROOM, "true"], check=False, stderr=-3).returncode == 0


@pytest.mark.skipif(not can_have_little_room(), reason="needs unshare with user and mount spaces")
def test_no_worker_meets_a_bus_error(tmp_path: Path) -> None:
    """Workers are tried, and only as far as their queues have room: 3 samples for each MiB."""
    script = write_workload(tmp_path, LARGE_SAMPLES)
    options = ("--trials", "30", "--time-budget", "90s", "--knob", "amp=off")
    run = autotune(script, *options, "--global-batch", "free", command=LITTLE_ROOM)

    assert run.code == 0, run.stderr
    assert {"crashed", "timed_out"}.isdisjoint(run.outcomes())
    launched = [trial["config"] for trial in run.trials if trial["outcome"] != "skipped"]
    queued = [c["num_workers"] * (c["prefetch_factor"] or 0) * c["batch_size"] for c in launched]
    assert 0 < max(queued) <= 6
