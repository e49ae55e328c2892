"""FX graph -> networkx DAG with costs."""
