"""Networks and processors that the benchmark of execution runs on."""
