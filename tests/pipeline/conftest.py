"""Half as many examples as elsewhere: a schedule is a large one."""

from hypothesis import settings

settings.register_profile("pipeline", settings.get_profile("weft"), max_examples=50)
settings.load_profile("pipeline")
