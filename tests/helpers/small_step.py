"""A small step as studies and ``solve`` take it: options by name, and as words of the command."""

from typing import Any

SIZES: dict[str, Any] = {
    "mesh": "fsdp=8",
    "seq": 64,
    "layers": 1,
    "budget": 0,
    "cluster": "h100-tcpx",
}
OPTIONS = [f"--{name}={value}" for name, value in SIZES.items()]
