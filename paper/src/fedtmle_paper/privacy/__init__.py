"""Section 4.3 of the paper: lower bounds, attacks and decoders that the silo's audit does not need."""
