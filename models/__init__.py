"""Workloads to schedule: plain PyTorch modules under named presets and meshes."""
