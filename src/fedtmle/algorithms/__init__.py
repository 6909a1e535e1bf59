"""The paper's algorithms, each a generator that every party runs on the same broadcasts."""
