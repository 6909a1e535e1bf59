"""Studies as people meet them: running one, its table, its file."""
