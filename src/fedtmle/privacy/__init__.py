"""The audit of what a server can infer from a silo's answers (section 4.3), for stated attackers."""
