"""Property tests without deadlines: machines are shared."""

from hypothesis import settings

settings.register_profile("weft", deadline=None, max_examples=50)
settings.load_profile("weft")
