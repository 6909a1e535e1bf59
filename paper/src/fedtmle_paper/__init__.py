"""The paper's target and experiments, and the parts of its theory that only they and the tests use.

``fedtmle reproduce`` and ``fedtmle demo --study transport`` run from here. This distribution is separate, so
that the wheel of ``fedtmle``, which every hospital installs, does not contain it.
"""
