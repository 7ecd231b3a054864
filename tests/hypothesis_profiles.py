"""How many examples Hypothesis tries: a quarter of them, unless --hypothesis-profile is `long`."""

from hypothesis import settings

LONG = 100
# No test asserts a duration. A failing example is printed so that it can be run again.
settings.register_profile("long", max_examples=LONG, deadline=None, print_blob=True)
settings.register_profile("short", settings.get_profile("long"), max_examples=LONG // 4)


def examples(long: int) -> int:
    """How many to try of a property for which the long profile tries `long`."""
    return long * settings().max_examples // LONG
