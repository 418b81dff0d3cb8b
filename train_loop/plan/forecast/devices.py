"""The GPUs that plans know, with memory, FLOP/s and bandwidths from their vendors' data sheets."""

import difflib
import re
from dataclasses import dataclass

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9
_HALF = ("bf16", "fp16")
_FLOAT8 = (*_HALF, "float8")
_FLOAT8_RATE = 2
"""FLOP/s in float8, relative to bf16, by all data sheets (L40S: 2.02)."""
_AMPERE, _HOPPER, _OTHER = (0.5, 0.9), (0.4, 0.8), (0.35, 0.85)
"""Range of a training step's matrix products, as parts of the peak FLOP/s.

The upper ends are rates of single large products. The lower ends are those of steps with small layers, or under a limit
of power. The range of other generations is wider, because no published step has been compared with it.
"""


@dataclass(frozen=True)
class Device:
    """A GPU model. Rates are per GPU and second: FLOP/s without sparsity, bytes in one direction."""

    name: str
    title: str
    """Name in the data sheet."""
    pattern: str
    """Regular expression for the name that CUDA reports; the first device in the table that matches counts."""
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second from its own memory."""
    tensor_flops: float
    """FLOP/s of tensor cores, dense, in the dtypes of `tensor_dtypes`; float8 has twice as many."""
    plain_flops: float
    """FLOP/s in fp32 without TF32, which torch disables by default."""
    link: float
    """Bytes per second to the other GPUs of its domain; PCIe if NVLink does not connect all of them."""
    host_link: float
    """Bytes per second to the memory of its host."""
    network: float | None = None
    """Bytes per second to other hosts, in the vendor's reference system; None if there is none."""
    domain: int = 8
    """GPUs that `link` connects in the vendor's reference system."""
    efficiency: tuple[float, float] = _OTHER
    """Range of the part of its peak that matrix products of a step reach."""
    tensor_dtypes: tuple[str, ...] = _HALF

    def peak(self, dtype: str) -> float | None:
        """Return the dense FLOP/s in a dtype (float8, bf16, fp16, fp32); None if it has no such kernels."""
        if dtype in self.tensor_dtypes:
            return self.tensor_flops * (_FLOAT8_RATE if dtype == "float8" else 1)
        return self.plain_flops if dtype == "fp32" else None


def _device(  # noqa: PLR0913 - a row of the table
    name: str,
    title: str,
    pattern: str,
    gib: int,
    gigabytes: float,
    teraflops: tuple[float, float],
    links: tuple[float, float],
    network: float | None = None,
    efficiency: tuple[float, float] = _OTHER,
    *,
    domain: int = 8,
    dtypes: tuple[str, ...] = _HALF,
) -> Device:
    tensor, plain = teraflops
    link, host = links
    return Device(
        name,
        title,
        pattern,
        memory=gib * GIB,
        bandwidth=gigabytes * _GIGA,
        tensor_flops=tensor * _TERA,
        plain_flops=plain * _TERA,
        link=link * _GIGA,
        host_link=host * _GIGA,
        network=None if network is None else network * _GIGA,
        domain=domain,
        efficiency=efficiency,
        tensor_dtypes=dtypes,
    )


DEVICE_SOURCES = (
    "memory, bandwidth, dense FLOP/s and links: NVIDIA's data sheets of each GPU; a link counts in one direction, half "
    "of the sheet's sum of both. float8: twice the FLOP/s, by the same sheets. Network: the reference systems DGX A100 "
    "(200 Gb/s a GPU), DGX H100, H200 and B200, and GB200 NVL72 (400 Gb/s a GPU)"
)
# name, title, pattern, GiB, GB/s, (TFLOP/s of tensor cores, of fp32), (GB/s of link, to the host), network
DEVICES: tuple[Device, ...] = (
    _device("gb200", "GB200 NVL72", r"\bGB200\b", 186, 8000, (2500, 80), (900, 450), 50, domain=72, dtypes=_FLOAT8),
    _device("b200", "B200", r"\bB200\b", 180, 8000, (2250, 75), (900, 64), 50, dtypes=_FLOAT8),
    _device("h200-nvl", "H200 NVL", r"\bH200 NVL\b", 141, 4800, (835.5, 60), (64, 64), None, _HOPPER, dtypes=_FLOAT8),
    _device("h100-nvl", "H100 NVL", r"\bH100 NVL\b", 94, 3900, (835.5, 60), (64, 64), None, _HOPPER, dtypes=_FLOAT8),
    _device("h100-pcie", "H100 PCIe", r"\bH100 PCIe\b", 80, 2000, (756.5, 51), (64, 64), None, _HOPPER, dtypes=_FLOAT8),
    _device("gh200", "GH200", r"\bGH200\b", 96, 4000, (989.5, 67), (450, 450), 50, _HOPPER, domain=1, dtypes=_FLOAT8),
    _device("h200", "H200 SXM", r"\bH200\b", 141, 4800, (989.5, 67), (450, 64), 50, _HOPPER, dtypes=_FLOAT8),
    _device("h800", "H800 SXM", r"\bH800\b", 80, 3350, (989.5, 67), (200, 64), 50, _HOPPER, dtypes=_FLOAT8),
    _device("h100-80g", "H100 SXM", r"\bH100\b", 80, 3350, (989.5, 67), (450, 64), 50, _HOPPER, dtypes=_FLOAT8),
    _device("h20", "H20", r"\bH20\b", 96, 4000, (148, 44), (450, 64), 50, dtypes=_FLOAT8),
    _device("a100-80g-pcie", "A100 80GB PCIe", r"\bA100.80GB.PCIe", 80, 1935, (312, 19.5), (32, 32), None, _AMPERE),
    _device("a100-80g", "A100 80GB SXM", r"\bA100\b.*80GB", 80, 2039, (312, 19.5), (300, 32), 25, _AMPERE),
    _device("a100-40g-pcie", "A100 40GB PCIe", r"\bA100.PCI", 40, 1555, (312, 19.5), (32, 32), None, _AMPERE),
    _device("a100-40g", "A100 40GB SXM", r"\bA100\b", 40, 1555, (312, 19.5), (300, 32), 25, _AMPERE),
    _device("a800", "A800 80GB SXM", r"\bA800\b", 80, 2039, (312, 19.5), (200, 32), 25, _AMPERE),
    _device("a30", "A30", r"\bA30\b", 24, 933, (165, 10.3), (32, 32)),
    _device("a40", "A40", r"\bA40\b", 48, 696, (149.7, 37.4), (32, 32)),
    _device("a10g", "A10G", r"\bA10G\b", 24, 600, (70, 35), (32, 32)),
    _device("a10", "A10", r"\bA10\b", 24, 600, (125, 31.2), (32, 32)),
    _device("l40s", "L40S", r"\bL40S\b", 48, 864, (362.05, 91.6), (32, 32), dtypes=_FLOAT8),
    _device("l40", "L40", r"\bL40\b", 48, 864, (181.05, 90.5), (32, 32), dtypes=_FLOAT8),
    _device("l4", "L4", r"\bL4\b", 24, 300, (121, 30.3), (32, 32), dtypes=_FLOAT8),
    _device("v100-sxm2", "V100 SXM2", r"\bV100-SXM2\b", 16, 900, (125, 15.7), (150, 16), dtypes=("fp16",)),
    _device("v100-pcie", "V100 PCIe", r"\bV100-PCIE\b", 16, 900, (112, 14), (16, 16), dtypes=("fp16",)),
    _device("t4", "T4", r"\bT4\b", 16, 320, (65, 8.1), (16, 16), dtypes=("fp16",)),
)


def device_named(name: str) -> Device:
    """Return the device with a name of the table, in any case. Raises ValueError with names that are near."""
    known = {device.name: device for device in DEVICES}
    wanted = name.strip().lower().replace("_", "-").removesuffix("b")
    if (found := known.get(wanted) or known.get(name.strip().lower())) is not None:
        return found
    models = {other.partition("-")[0] for other in known}
    near = difflib.get_close_matches(wanted.partition("-")[0], models, 1)
    alike = [other for other in known if other.startswith(wanted)] or [
        other for other in known if near and other.partition("-")[0] == near[0]
    ]
    meant = f"did you mean {' or '.join(alike)}? " if alike else ""
    raise ValueError(f"unknown device {name[:64]!r}; {meant}known devices: {', '.join(known)}")


def device_of(reported: str) -> Device | None:
    """Return the device with a name that CUDA or a cluster reports; None if the table does not have it.

    A slice of a GPU (MIG) has the name of the whole GPU, and is not in the table.
    """
    if "MIG" in reported:
        return None
    return next((device for device in DEVICES if re.search(device.pattern, reported)), None)
