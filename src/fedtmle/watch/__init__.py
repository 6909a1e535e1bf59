"""The live view: follows the events of a running session on a page of this machine."""
