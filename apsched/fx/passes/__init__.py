"""Graph passes ``gm -> gm`` that scheduling stands on: small, composable, each with a spec of its
own (docs/passes.md).

A pass list is a value; :func:`apsched.fx.passes.run_passes.run_passes` is the one loop that runs
it. Nothing is imported here.
"""
