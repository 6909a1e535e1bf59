"""The result of a study: intervals and tests, the saved document, and its parts as plain data."""
