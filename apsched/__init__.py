"""apsched: the fastest communication schedule that fits the memory, with a proof of how far it can
be from the best.

The public names, with the module of each, are those of ``__init__.pyi``. They are imported when
first used (PEP 562), so that nothing imports torch before it is needed.
"""

import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

_PUBLIC = {
    name: module
    for module, name in re.findall(
        r"^from (\S+) import (\w+) as \2$",
        Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}
"""Public name -> module."""

_RENAMED = {
    "ClusterCostModel": "apsched.costs.cluster_model.ClusterCostModel",
    "MeasuredCostModel": "apsched.costs.measured_model.MeasuredCostModel",
    "apply_fsdp2": "apsched.integrations.fsdp2.apply_fsdp2",
    "capture_graph_module": "apsched.capture_graph",
    "export": "apsched.export_graph",
    "fsdp2_plan": "apsched.integrations.fsdp2.fsdp2_plan",
    "hold_order": "apsched.writeback.hold_order.hold_order",
    "load_cluster": "apsched.costs.clusters.cluster.load_cluster",
    "load_costs": "apsched.costs.measured_file.load_costs",
    "measure": "apsched.measure_costs",
}
"""Public name of earlier versions -> the name to use."""

__all__ = sorted([*_PUBLIC, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        now = _RENAMED[name]
        warnings.warn(
            f"apsched.{name} is deprecated and goes with the next version; use {now}",
            DeprecationWarning,
            stacklevel=2,
        )
        module, _, attribute = now.rpartition(".")
        return getattr(import_module(module), attribute)
    if name not in _PUBLIC:
        raise AttributeError(f"module 'apsched' has no attribute {name!r}")
    function = getattr(import_module(_PUBLIC[name]), name)
    value = sys.modules.get(f"{__name__}.{name}", function)  # a CallablePackage, which calls it
    globals()[name] = value
    return value


class CallablePackage(ModuleType):
    """A package with the name of a public function, which calling it calls: ``apsched.capture``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the public function of this name."""
        return self._function()(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        """Return the signature of the public function, for ``inspect`` and notebooks."""
        import inspect

        return inspect.signature(self._function())

    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
