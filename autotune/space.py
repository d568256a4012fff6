"""Config: one setting of every knob. SearchSpace: which may be tried, and why others may not."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from autotune.errors import OptionInvalid

Value = bool | int | str | None
"""What a knob may be set to."""

PRECISIONS = ("off", "bf16", "fp16")
"""Every value of the knob `amp`."""

DEFAULT_BATCH_SIZE = 32
"""Where nobody stated a batch size, the baseline has at most this many samples (DESIGN 2.2)."""

MOST_WORKERS = 16
"""More loader workers than this were never chosen in the study (METHOD.md B.1)."""

PREFETCH_FACTORS = (2, 4, 8)
"""Batches that each worker may prepare ahead; 2 is PyTorch's default."""

CHECKPOINTING = ("off", "full")
"""Every value of the knob `checkpointing`, cheapest first (MEMORY.md D)."""

SWITCHES = ("persistent_workers", "pin_memory", "cudnn_benchmark")
"""The knobs that are on or off."""

_ON_OFF: Mapping[object, bool] = {"on": True, "off": False, True: True, False: False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One setting of every knob.

    Args:
        batch_size: Samples in a micro-batch, on each device.
        accumulation_steps: Micro-batches whose gradients make one optimizer step.
        amp: Precision of autocast: `"off"`, `"bf16"`, or `"fp16"` with a GradScaler.
        checkpointing: What is recomputed for backward: nothing, or with `"full"` every block.
        num_workers: Loader processes; 0 loads in the training process.
        prefetch_factor: Batches that each worker prepares ahead; None without workers.
        persistent_workers: Whether workers live on between epochs; False without workers.
        pin_memory: Whether batches are copied to page-locked memory.
        cudnn_benchmark: Whether cuDNN tries its algorithms for each new shape.
        threads: Intra-op threads of a CPU device; None leaves PyTorch's default.

    Raises:
        OptionInvalid: If a value breaks a rule; the message names the rule, then the value.

    >>> Config(batch_size=16, accumulation_steps=2, amp="bf16").describe()
    'batch 16 x 2, bf16'
    """

    batch_size: int
    accumulation_steps: int = 1
    amp: str = "off"
    checkpointing: str = "off"
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    cudnn_benchmark: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _require_count(name, value, least)
        for name, choices in _CHOICES.items():
            _require_choice(name, getattr(self, name), choices)
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.persistent_workers):
            raise OptionInvalid(
                "prefetch_factor and persistent_workers need at least one loader worker, "
                f"but num_workers is 0 with {self.prefetch_factor} and {self.persistent_workers}"
            )

    @property
    def samples_per_optimizer_step(self) -> int:
        """Samples of one optimizer step on one device."""
        return self.batch_size * self.accumulation_steps

    def with_workers(self, num_workers: int, *, prefetch_factor: int = 2) -> Self:
        """Return this config with so many loader workers, which live on between epochs."""
        has_workers = num_workers > 0
        return replace(
            self,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if has_workers else None,
            persistent_workers=has_workers,
        )

    def to_dict(self) -> dict[str, Value]:
        """Return knob → value, as `config.json` holds it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the config of knob → value.

        Raises:
            OptionInvalid: If a knob is unknown, `batch_size` is missing, or a rule is broken.
        """
        unknown = sorted(set(document) - set(knob_names()))
        if unknown:
            raise unknown_knob(unknown[0])
        if "batch_size" not in document:
            raise OptionInvalid("a config needs a batch_size, but none was given")
        return cls(**document)

    def describe(self) -> str:
        """Return the config in a few words, leaving out what is at PyTorch's default."""
        parts = [f"batch {self.batch_size}"]
        if self.accumulation_steps > 1:
            parts[0] += f" x {self.accumulation_steps}"
        parts.append("fp32" if self.amp == "off" else self.amp)
        if self.checkpointing != "off":
            parts.append("checkpointed")
        if self.num_workers:
            parts.append(f"{self.num_workers} worker{'s' * (self.num_workers > 1)}")
            if self.prefetch_factor != PREFETCH_FACTORS[0]:
                parts.append(f"prefetch {self.prefetch_factor}")
        if self.threads is not None:
            parts.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        switches = {"pinned memory": self.pin_memory, "cudnn.benchmark": self.cudnn_benchmark}
        return ", ".join(parts + [name for name, is_on in switches.items() if is_on])


_LEAST = {
    "batch_size": 1,
    "accumulation_steps": 1,
    "num_workers": 0,
    "prefetch_factor": 1,
    "threads": 1,
}
_MAY_BE_NONE = ("prefetch_factor", "threads")
_CHOICES = {"amp": PRECISIONS, "checkpointing": CHECKPOINTING, **dict.fromkeys(SWITCHES)}
"""The values of a knob that has few; None for a switch, which is on or off."""


def _require_choice(name: str, value: object, choices: tuple[str, ...] | None) -> None:
    if choices is None and not isinstance(value, bool):
        raise OptionInvalid(f"{name} needs on or off, but got {value!r}")
    if choices is not None and value not in choices:
        raise OptionInvalid(f"{name} needs one of {', '.join(choices)}, but got {value!r}")


def _require_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionInvalid(f"{name} needs a whole number of at least {least}, but got {value!r}")


def knob_names() -> tuple[str, ...]:
    """Return the names of all knobs, in the order in which a config shows them."""
    return tuple(item.name for item in fields(Config))


def parse_value(knob: str, value: Any) -> Any:
    """Return `value` as a config holds it: switches from on and off, numbers from text.

    What it cannot read it returns as it is; `Config` says what is wrong with it.

    Raises:
        OptionInvalid: If the knob is unknown, or is a switch and `value` is neither on nor off.

    >>> parse_value("pin_memory", "on"), parse_value("num_workers", "4")
    (True, 4)
    """
    if knob not in knob_names():
        raise unknown_knob(knob)
    if knob in SWITCHES:
        if not isinstance(value, bool | str) or value not in _ON_OFF:
            raise OptionInvalid(f"{knob} needs on or off, but got {value!r}")
        return _ON_OFF[value]
    if knob == "amp":
        return "off" if value is False else value
    if value == "default":
        return None
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def unknown_knob(name: str) -> OptionInvalid:
    """Return the error that says which knobs there are."""
    return OptionInvalid(
        f"there is no knob named {name!r}", hint=f"the knobs are: {', '.join(knob_names())}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Which configs may be tried.

    Args:
        values: Knob → the values to try, in ascending order.
        global_batch: Samples of every optimizer step, over all ranks; None where it is free.
        effective_batch: The baseline's samples per optimizer step.
        world_size: Number of data-parallel ranks.
        left_out: Knob → why it is not tuned.
    """

    values: Mapping[str, tuple[Value, ...]]
    global_batch: int | None
    effective_batch: int
    world_size: int = 1
    left_out: Mapping[str, str] = field(default_factory=dict)

    def choices(self, knob: str) -> tuple[Value, ...]:
        """Return the values to try of a knob; none where the space does not speak of it."""
        return self.values.get(knob, ())

    def with_workers(self, config: Config, num_workers: int) -> Config:
        """Return `config` with so many loader workers, set up as this space allows.

        Batches prepared ahead and workers that live on are at PyTorch's default of 2 and on, or at
        the first allowed value where that is not among them.
        """
        if num_workers == 0:
            return config.with_workers(0)
        ahead = self.choices("prefetch_factor") or (None,)
        return Config.from_dict(
            config.to_dict()
            | {
                "num_workers": num_workers,
                "prefetch_factor": PREFETCH_FACTORS[0]
                if PREFETCH_FACTORS[0] in ahead
                else ahead[0],
                "persistent_workers": True in self.choices("persistent_workers"),
            }
        )

    def splits(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of batch size and accumulation steps, by ascending batch size.

        With a fixed global batch, batch size × accumulation × world size equals it in each pair
        (DESIGN 8, promise 3). Where it is free, smaller batches are accumulated up to the
        baseline's effective batch and larger ones are not accumulated.
        """
        wanted = self.values.get("accumulation_steps")
        pairs = [(size, self._accumulation(size)) for size in self._sizes()]
        return tuple(
            (size, steps) for size, steps in pairs if steps and (wanted is None or steps in wanted)
        )

    def _sizes(self) -> Iterator[int]:
        return (value for value in self.values["batch_size"] if isinstance(value, int))

    def _accumulation(self, batch_size: int) -> int:
        """Return how many micro-batches make a step; 0 where none do."""
        target = self.global_batch or self.effective_batch
        whole, rest = divmod(target, batch_size * self.world_size)
        if self.global_batch is None and batch_size * self.world_size >= target:
            return 1
        return 0 if rest else whole

    def __contains__(self, config: object) -> bool:
        """Whether this config may be tried: every knob at a value of the space."""
        if not isinstance(config, Config):
            return False
        if (config.batch_size, config.accumulation_steps) not in self.splits():
            return False
        loose = {"batch_size", "accumulation_steps"}
        return all(
            getattr(config, name) in choices
            for name, choices in self.values.items()
            if name not in loose
            and not (name in {"prefetch_factor", "persistent_workers"} and not config.num_workers)
        )


def batch_sizes(*, global_batch: int | None, effective_batch: int, most: int | None) -> list[int]:
    """Return the batch sizes worth trying, ascending.

    With a fixed global batch these are its divisors; where it is free, the divisors of the
    baseline's effective batch below it, and powers of two and their halves above. None is larger
    than `most`, the length of the data set.

    >>> batch_sizes(global_batch=12, effective_batch=12, most=None)
    [1, 2, 3, 4, 6, 12]
    >>> batch_sizes(global_batch=None, effective_batch=4, most=20)
    [1, 2, 4, 6, 8, 12, 16, 20]
    """
    target = global_batch or effective_batch
    sizes = {size for size in range(1, target + 1) if target % size == 0}
    if global_batch is None:
        sizes |= _grown(target, LARGEST_FREE_BATCH if most is None else most)
        sizes |= set() if most is None else {most}
    return sorted(size for size in sizes if most is None or size <= most)


def _grown(least: int, most: int) -> set[int]:
    """Return powers of two up to `most` and the middles between them, none below `least`."""
    powers = {1 << n for n in range(most.bit_length())}
    return {size for power in powers for size in (power, power + power // 2) if size >= least}


LARGEST_FREE_BATCH = 2**16
"""Beyond this CUDA's grid limits are met before memory is (CASES.md row 52)."""


def largest_power_of_two(most: int) -> int:
    """Return the largest power of two that is not above `most`."""
    return 1 << (max(most, 1).bit_length() - 1)
