"""Results, cohorts, audits and progress as plain text for a terminal."""
