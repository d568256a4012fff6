"""Traces of a few allocations, for tests that need no torch."""

from autotune.memory.trace import Category, Phase, Trace


def trace_of(
    sizes: tuple[int, ...],
    events: tuple[int, ...],
    *,
    batch_size: int = 2,
    phases: tuple[tuple[int, Phase], ...] = ((0, Phase.FORWARD),),
    steps: tuple[int, ...] = (0,),
    hidden: tuple[str, ...] = (),
) -> Trace:
    """Return a trace whose first allocation is a parameter, and whose others are activations."""
    others = (Category.ACTIVATIONS,) * (len(sizes) - 1)
    return Trace(
        batch_size=batch_size,
        sizes=sizes,
        categories=(Category.PARAMETERS, *others),
        owners=("", *(f"layer{number}" for number in range(1, len(sizes)))),
        events=events,
        phases=phases,
        steps=steps,
        hidden=hidden,
    )
