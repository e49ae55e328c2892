"""Workloads to schedule: plain PyTorch modules under named presets and meshes."""

from apsched.models.build import BuiltModel, build, names
from apsched.models.mesh import MeshSpec
from apsched.models.options import ModelOptions
from apsched.models.preset_capture import capture_built, capture_preset
from apsched.models.training import descend, forward_inputs, run_step

__all__ = [
    "BuiltModel",
    "MeshSpec",
    "ModelOptions",
    "build",
    "capture_built",
    "capture_preset",
    "descend",
    "forward_inputs",
    "names",
    "run_step",
]
