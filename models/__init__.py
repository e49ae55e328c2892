"""Workloads to schedule: plain PyTorch modules under named presets and meshes.

``build.build`` makes a preset, ``preset_capture.capture_preset`` captures it, ``training`` runs it.
Nothing is imported here, so that ``presets`` (the names and sizes) can be read without torch.
"""
