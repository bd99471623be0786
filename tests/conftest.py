"""Settings that all tests share."""

from hypothesis import settings

settings.register_profile("house", deadline=None, print_blob=True)  # a first call compiles: time is no verdict
settings.load_profile("house")
