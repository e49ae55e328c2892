"""Scheduling inside of a compiler: one function that every surface calls (``schedule_graph``), and
the surfaces of torch.compile.
"""
