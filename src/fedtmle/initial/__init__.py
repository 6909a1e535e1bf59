"""Initial estimates: the models that a study writes as formulas, fitted across silos."""
