"""Config: one setting of every knob. SearchSpace: which may be tried, and why others may not."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from autotune.errors import OptionInvalid
from autotune.knobs import Value, knob_names, require_value, unknown_knob

Goal = Literal["throughput", "memory"]
"""What is best: most samples per second, or the smallest peak that keeps 95 % of them."""

DEFAULT_BATCH_SIZE = 32
"""Where nobody stated a batch size, the baseline has at most this many samples (DESIGN 2.2)."""

WORKER_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of loader workers worth trying: one more means less the more there are, and more than 16
were never chosen in the study (METHOD.md B.1)."""

PREFETCH_FACTORS = (2, 4, 8)
"""Batches that each worker may prepare ahead; 2 is PyTorch's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One setting of every knob.

    Args:
        batch_size: Samples in a micro-batch, on each device.
        accumulation_steps: Micro-batches whose gradients make one optimizer step.
        amp: Precision of autocast: `"off"`, `"bf16"`, or `"fp16"` with a GradScaler.
        checkpointing: What is recomputed for backward: nothing, with `"full"` every block, with
            `"alternate"` every second one; with `"selective_matmul"` of each block all but matmuls
            and convolutions, with `"selective"` all but these and attention.
        num_workers: Loader processes; 0 loads in the training process.
        prefetch_factor: Batches that each worker prepares ahead; None without workers.
        persistent_workers: Whether workers live on between epochs; False without workers.
        pin_memory: Whether batches are copied to page-locked memory.
        cudnn_benchmark: Whether cuDNN tries its algorithms for each new shape.
        threads: Intra-op threads of a CPU device; None leaves PyTorch's default.
        channels_last: Whether the channels of images and of convolutions lie last in memory.
        optimizer_impl: How the optimizer steps: `"default"` as the user made it, `"foreach"` or
            `"fused"`.

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
    channels_last: bool = False
    optimizer_impl: str = "default"

    def __post_init__(self) -> None:
        for name in knob_names():
            require_value(name, getattr(self, name))
        idle = (self.prefetch_factor, self.persistent_workers)
        if self.num_workers == 0 and idle != (None, False):
            raise OptionInvalid(
                "prefetch_factor and persistent_workers need at least one loader worker, "
                f"but num_workers is 0 with {idle[0]} and {idle[1]}"
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

    def flags(self) -> str:
        """Return the config as command-line flags; what is off or PyTorch's default is left out.

        >>> Config(batch_size=16, pin_memory=True).flags()[-28:]
        '--num-workers 0 --pin-memory'
        """
        set_here = ((k, v) for k, v in self.to_dict().items() if v is not False)
        set_here = ((k, v) for k, v in set_here if v not in {None, "default"})
        flags = ((f"--{knob.replace('_', '-')}", value) for knob, value in set_here)
        return " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags)

    def describe(self) -> str:
        """Return the config in a few words, leaving out what is at PyTorch's default."""
        parts = (
            self._batch_words(),
            _AMP_WORDS[self.amp],
            _CHECKPOINTING_WORDS[self.checkpointing],
            _counted(self.num_workers, "worker"),
            self._prefetch_words(),
            _counted(self.threads, "thread"),
            _PINNING_WORDS[self.pin_memory],
            _CUDNN_WORDS[self.cudnn_benchmark],
            _LAYOUT_WORDS[self.channels_last],
            _OPTIMIZER_WORDS[self.optimizer_impl],
        )
        return ", ".join(filter(None, parts))

    def _batch_words(self) -> str:
        words = f"batch {self.batch_size}"
        return words if self.accumulation_steps == 1 else f"{words} x {self.accumulation_steps}"

    def _prefetch_words(self) -> str:
        if self.num_workers == 0 or self.prefetch_factor == PREFETCH_FACTORS[0]:
            return ""
        return f"prefetch {self.prefetch_factor}"


_AMP_WORDS = {"off": "fp32", "bf16": "bf16", "fp16": "fp16"}
_CHECKPOINTING_WORDS = {
    "off": "",
    "selective": "checkpointed but for matmuls and attention",
    "selective_matmul": "checkpointed but for matmuls",
    "alternate": "every second block checkpointed",
    "full": "checkpointed",
}
_PINNING_WORDS = {False: "", True: "pinned memory"}
_CUDNN_WORDS = {False: "", True: "cudnn.benchmark"}
_LAYOUT_WORDS = {False: "", True: "channels last"}
_OPTIMIZER_WORDS = {"default": "", "foreach": "foreach optimizer", "fused": "fused optimizer"}


def _counted(number: int | None, noun: str) -> str:
    """Return a number with its noun; empty where there is none of it."""
    if not number:
        return ""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Which configs may be tried.

    Args:
        values: Knob → the values to try, in ascending order.
        global_batch: Samples of every optimizer step, over all ranks; None where it is free.
        effective_batch: The baseline's samples per optimizer step.
        world_size: Number of data-parallel ranks.
        left_out: Knob → why it is not tuned.
        most_queued: Samples that may wait in the queues of loader workers; None for any number.
    """

    values: Mapping[str, tuple[Value, ...]]
    global_batch: int | None
    effective_batch: int
    world_size: int = 1
    left_out: Mapping[str, str] = field(default_factory=dict)
    most_queued: int | None = None

    @property
    def target_batch(self) -> int:
        """Samples of an optimizer step to accumulate to: fixed, or the baseline's."""
        return self.global_batch or self.effective_batch

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

    def with_allowed_knobs(self, config: Config) -> Config:
        """Return `config` with knobs that all sizes share at a value of this space."""
        wanted = {name: self.choices(name) for name in _SHARED_KNOBS}
        changed = {
            name: values[-1]
            for name, values in wanted.items()
            if values and getattr(config, name) not in values
        }
        return Config.from_dict(config.to_dict() | changed)

    def splits(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of batch size and accumulation steps, by ascending batch size.

        With a fixed global batch, batch size × accumulation × world size equals it in each pair
        (DESIGN 8, promise 3). Where it is free, smaller batches are accumulated up to the
        baseline's effective batch and larger ones are not accumulated.
        """
        pairs = ((size, self._accumulation(size)) for size in self._sizes())
        return tuple((size, steps) for size, steps in pairs if self._is_wanted(steps))

    def _sizes(self) -> Iterator[int]:
        return (value for value in self.values["batch_size"] if isinstance(value, int))

    def _accumulation(self, batch_size: int) -> int:
        """Return how many micro-batches make a step; 0 where none do."""
        whole, rest = divmod(self.target_batch, batch_size * self.world_size)
        if rest == 0:
            return whole
        is_larger = self.global_batch is None and whole == 0
        return 1 if is_larger else 0

    def _is_wanted(self, accumulation_steps: int) -> bool:
        wanted = self.values.get("accumulation_steps", (accumulation_steps,))
        return accumulation_steps > 0 and accumulation_steps in wanted

    def __contains__(self, config: object) -> bool:
        """Whether this config may be tried: every knob at a value of the space."""
        return isinstance(config, Config) and self._allows(config)

    def _allows(self, config: Config) -> bool:
        split = (config.batch_size, config.accumulation_steps)
        bound = _SPLIT_KNOBS if config.num_workers else _SPLIT_KNOBS | _WORKER_KNOBS
        free = set(self.values) - bound
        is_within = all(getattr(config, name) in self.values[name] for name in free)
        return is_within and split in self.splits() and self.has_room(config)

    def has_room(self, config: Config) -> bool:
        """Whether the batches that wait in the queues of a config's workers have room there."""
        queued = config.num_workers * (config.prefetch_factor or 2) * config.batch_size
        return self.most_queued is None or queued <= self.most_queued


_SPLIT_KNOBS = frozenset({"batch_size", "accumulation_steps"})
"""Allowed as a pair only."""

_SHARED_KNOBS = ("threads", "pin_memory", "cudnn_benchmark", "channels_last", "optimizer_impl")
"""Knobs that are set the same at every batch size and in every cell."""

_WORKER_KNOBS = frozenset({"prefetch_factor", "persistent_workers"})
"""Without workers there is nothing to choose."""


def divisors(whole: int) -> list[int]:
    """Return what divides `whole`, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [size for size in range(1, whole + 1) if whole % size == 0]


def powers_of_two(most: int) -> list[int]:
    """Return the powers of two that are not above `most`, ascending.

    >>> powers_of_two(6)
    [1, 2, 4]
    """
    return [1 << n for n in range(most.bit_length())]


def largest_power_of_two(most: int) -> int:
    """Return the largest power of two that is not above `most`; 1 where none is."""
    return powers_of_two(max(most, 1))[-1]
