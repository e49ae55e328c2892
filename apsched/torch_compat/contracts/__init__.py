"""What apsched relies on in torch beyond its public functions, as checks that run anywhere:
``python -m apsched.torch_compat.contracts``.
"""
