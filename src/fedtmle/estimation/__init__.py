"""Programs outside the core: they ask questions, see totals over all hospitals, and never a record."""
