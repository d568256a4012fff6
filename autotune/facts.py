"""What is known of the workload and of the machine before anything is tried.

Plain numbers and names, read once in a launch of its own and sent to whoever decides; nothing
here needs torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

LOADER_SETTINGS = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
)
"""The settings a `loader_fn` may accept, as DESIGN 2.1 names them."""


UNKNOWN = "unknown"
"""The source of a workload whose text cannot be read: its launches are of no use to a later run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """The device, in plain numbers.

    Args:
        kind: `"cpu"` or `"cuda"`.
        name: What the vendor calls it.
        native_precisions: Those of `off`, `bf16`, `fp16` that the hardware computes itself.
        total_bytes: All its memory.
        free_bytes: What can be had now, the limits of a container included.
        usable_cores: Cores that this process may use: affinity and quota of its container.
        threads: Intra-op threads that PyTorch takes by default there.
        host_bytes: What can be had now of the machine's own memory, which loader workers take.
        shared_bytes: Free bytes where workers hand over batches; None where that has no bound.
    """

    kind: str
    name: str
    native_precisions: tuple[str, ...]
    total_bytes: int
    free_bytes: int
    usable_cores: int
    threads: int
    host_bytes: int | None = None
    shared_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON takes them."""
        return asdict(self) | {"native_precisions": list(self.native_precisions)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the facts that `to_dict` wrote."""
        return cls(
            **{**document, "native_precisions": tuple(document["native_precisions"])},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """What the workload is, as far as the search must know it.

    Args:
        dataset_length: Samples in the data set; None where it has no length.
        loader_settings: Those of `LOADER_SETTINGS` that `loader_fn` accepts.
        stated_batch_size: The batch size the user stated: the `DataLoader`'s, or the default of
            `loader_fn`'s parameter; None where none was stated.
        stated_settings: The loader settings that the user has today, of a `DataLoader` handed in.
        parameter_bytes: Bytes of parameters and buffers.
        trainable_parameters: Number of trainable scalars.
        has_convolutions: Whether a module is a convolution.
        has_batch_norm: Whether a module normalises over the batch.
        varies_in_shape: Whether two batches of one size had different shapes.
        drops_last: Whether the loader drops a short last batch.
        loss: How the loss is computed: `"loss_fn"`, or by the form of the batch: `"named"`,
            `"dict"`, `"items"`, `"shifted_items"`, `"pair"`, `"whole"`, `"classes"` or `"values"`.
        has_evaluation: Whether an `eval_loader_fn` was given.
        blocks: Names of the modules that checkpointing may recompute; none where there are none.
        checkpointing: Kinds of checkpointing that make a difference for these, cheapest first.
        batch: One line that describes the first batch.
        weight: What the default loss is a mean over: `"samples"`, `"labels"`, `"shifted_labels"`,
            `"label_values"`, `"classes"` or `"values"`.
        nesting: What a batch is: a `"dict"` of tensors, `"parts"` in a list or a tuple, a
            `"tensor"`, these `"nested"`, or something `"other"`.
        is_map_style: Whether the loader is a `DataLoader` that draws batches of indices.
        repeats_by_worker: Whether each of several workers yields all of a stream.
        uses_cache: Whether a module is set to cache keys and values.
        has_block_buffers: Whether one of the blocks holds a buffer.
        functions: Those of the workload's functions that there are, `loader_fn` apart.
        eval_loader_settings: Those of `LOADER_SETTINGS` that `eval_loader_fn` accepts.
        largest_samples: Indices of the largest samples of the data set, largest first; empty
            where they cannot be known.
        sample_bytes: Bytes of a sample in a batch, of the largest that is known.
        scanned_samples: How many samples were looked at to find them.
        fingerprint: What makes the workload the same workload; see DESIGN 2.4.
        has_image_batches: Whether the first batch holds a floating tensor of four dimensions.
        has_volumes: Whether a parameter or a buffer has five dimensions.
        is_channels_last: Whether the user has set the weights so already.
        optimizer: The name of the optimizer's class.
        optimizer_impls: In which ways the optimizer may be told to step, beside the way that it
            takes by itself.
        is_optimizer_fused: Whether the way that it takes by itself is `fused`.
        does_itself: What the model or its loss does by itself that a knob would do, or that a
            reader should know of → how: `amp`, `scaler`, `checkpointing`, `compile`, `shared`.
        options: The script's `autotune_options`.
    """

    dataset_length: int | None
    loader_settings: tuple[str, ...]
    stated_batch_size: int | None
    parameter_bytes: int
    trainable_parameters: int
    has_convolutions: bool
    has_batch_norm: bool
    varies_in_shape: bool
    drops_last: bool
    loss: str
    has_evaluation: bool
    batch: str
    blocks: tuple[str, ...] = ()
    checkpointing: tuple[str, ...] = ("full",)
    weight: str = "samples"
    nesting: str = "other"
    is_map_style: bool = False
    repeats_by_worker: bool = False
    uses_cache: bool = False
    has_block_buffers: bool = False
    functions: tuple[str, ...] = ()
    eval_loader_settings: tuple[str, ...] = ()
    largest_samples: tuple[int, ...] = ()
    sample_bytes: int = 0
    scanned_samples: int = 0
    has_image_batches: bool = False
    has_volumes: bool = False
    is_channels_last: bool = False
    optimizer: str = "the optimizer"
    optimizer_impls: tuple[str, ...] = ()
    is_optimizer_fused: bool = False
    does_itself: Mapping[str, str] = field(default_factory=dict)
    stated_settings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON takes them."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return plain | {
            **{name: list(getattr(self, name)) for name in _LISTS},
            "does_itself": dict(self.does_itself),
            "stated_settings": dict(self.stated_settings),
            "fingerprint": dict(self.fingerprint),
            "options": dict(self.options),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the facts that `to_dict` wrote."""
        return cls(**{**document, **{name: tuple(document[name]) for name in _LISTS}})


_LISTS = (
    "loader_settings",
    "blocks",
    "checkpointing",
    "functions",
    "eval_loader_settings",
    "largest_samples",
    "optimizer_impls",
)
"""Fields of `WorkloadFacts` that are tuples, and lists in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known before anything is tried.

    Args:
        workload: What the workload is.
        device: What the device is.
        overhead_bytes: What the surveying process took of the device beside any tensor: on a CPU
            its resident memory, which is mostly libraries.
    """

    workload: WorkloadFacts
    device: DeviceFacts
    overhead_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the survey as JSON takes it."""
        return {
            "workload": self.workload.to_dict(),
            "device": self.device.to_dict(),
            "overhead_bytes": self.overhead_bytes,
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the survey that `to_dict` wrote."""
        return cls(
            workload=WorkloadFacts.from_dict(document["workload"]),
            device=DeviceFacts.from_dict(document["device"]),
            overhead_bytes=document["overhead_bytes"],
        )
