"""The reference of the GPUs that plans know, from the table in the code."""

from tools.docs.markdown import code, table
from train_loop.plan import DEVICE_SOURCES, DEVICES, Device

_GIB, _GIGA, _TERA = 2**30, 1e9, 1e12


def page() -> str:
    """Return the Markdown of the page."""
    names = ("name", "GPU", "memory, GiB", "GB/s", "TFLOP/s", "in", "fp32", "link, GB/s", "GPUs", "network", "host")
    return (
        "# Devices\n\n"
        "`trainshed plan --device NAME` compares a spec with one of these GPUs, and [forecasts]"
        "(../guides/planning.md) its throughput. Rates are per GPU. `TFLOP/s` are dense, on tensor cores, in the "
        "dtypes of the next column; in float8, twice as many. `link` connects the number of `GPUs`, `network` other "
        "hosts, and `host` the memory "
        f"of the host, each in GB/s in one direction.\n\nSources: {DEVICE_SOURCES}.\n\n"
        + table(names, map(_row, DEVICES))
    )


def _row(device: Device) -> tuple[str, ...]:
    network = "unknown" if device.network is None else f"{device.network / _GIGA:g}"
    return (
        code(device.name),
        device.title,
        f"{device.memory / _GIB:g}",
        f"{device.bandwidth / _GIGA:g}",
        f"{device.tensor_flops / _TERA:g}",
        ", ".join(device.tensor_dtypes),
        f"{device.plain_flops / _TERA:g}",
        f"{device.link / _GIGA:g}",
        str(device.domain),
        network,
        f"{device.host_link / _GIGA:g}",
    )
