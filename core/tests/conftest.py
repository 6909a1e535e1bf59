"""Settings of property tests."""

from hypothesis import settings

settings.register_profile("fedtmle", deadline=None)  # a busy machine is no defect
settings.load_profile("fedtmle")
