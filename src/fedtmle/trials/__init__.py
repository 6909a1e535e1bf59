"""Target trials emulated on OMOP databases: the trial, its SQL, the cohorts and the effect."""
