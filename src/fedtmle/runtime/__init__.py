"""The runtime ring: silos and sessions on bytes, federations, transcripts and results."""
