"""Private functions of torch that apsched uses, as checks that run anywhere: ``python -m
apsched.torch_compat.contracts``.
"""
