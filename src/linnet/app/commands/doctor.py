"""`linnet doctor`: report installed packages, devices, and what does not work on this machine."""

from __future__ import annotations

import re
from typing import Any

from linnet import __version__
from linnet.app.terminal import kept


def doctor(*, seconds: float = 0.5) -> dict[str, Any]:
    """Report what is installed, what works on this machine, and why the rest does not.

    Args:
        seconds: Time spent on measuring the speed of matrix products, on each device.

    Returns:
        Versions, devices with their memory and speed, optional packages, and how linnet forms directional
        derivatives of each kind of layer here.
    """
    from linnet.machine import survey

    result = {"linnet": __version__, **survey(seconds)}
    _print(result)
    return result


def _pasted(text: str) -> str:
    """A text in which commands stay on one line."""
    return re.sub("pip [^,]+", lambda match: kept(match[0]), text)


def _print(result: dict[str, Any]) -> None:
    """The result for people."""
    from linnet.memory import format_bytes

    print(f"linnet {result['linnet']}, Python {result['python']}, {result['platform']}")
    print(
        "packages:    "
        + ", ".join(f"{name} {version or 'MISSING'}" for name, version in result["packages"].items())
    )
    if result["namesake"]:
        print(f"another project's linnet is installed beside this one: {_pasted(result['namesake'])}")
    for device in result["devices"]:
        threads = f", {result['threads']} threads" if device["device"] == "cpu" else ""
        print(
            f"{device['device'] + ':':<13}{device['name']}{threads}, "
            f"{format_bytes(device['available_bytes'])} free, "
            f"{device['sgemm_gflops']:.0f} GFLOP/s in float32 products"
        )
    print("optional packages:")
    for name, package in result["optional"].items():
        if package["works"]:
            print(f"  {name:<16}{package['version']}, for {package['use']}")
        else:
            print(f"  {name:<16}{package['reason']} (for {package['use']}: {_pasted(package['remedy'])})")
    print("directional derivatives, by kind of layer:")
    for name, probe in result["derivatives"].items():
        print(f"  {name:<16}{probe['path'] or 'NONE'}{': ' * bool(probe['reason'])}{probe['reason']}")
    print(
        "everything that linnet needs works here"
        if result["ok"]
        else "linnet will not work as it should here"
    )
