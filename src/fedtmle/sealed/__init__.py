"""Sealed runs: the server as a relay, and hospitals that follow one flow of questions through their cores."""
