"""The suites of `benchmarks.bench`: each module has ``rows(quick)``, which yields the rows of the table."""
