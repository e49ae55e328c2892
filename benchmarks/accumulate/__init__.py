"""Several micro-batches in a row: parameters gathered once or each time, gradients reduced once or
each time.
"""
