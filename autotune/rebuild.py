"""A loader factory from a user's own `DataLoader` or `Dataset`: same data, other settings."""

import copy
from collections.abc import Iterable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from autotune.errors import WorkloadInvalid

EXAMPLE_FACTORY = """\
def loader_fn(batch_size, num_workers, prefetch_factor, pin_memory, persistent_workers):
    return DataLoader(dataset, batch_size, shuffle=True, num_workers=num_workers,
                      prefetch_factor=prefetch_factor, pin_memory=pin_memory,
                      persistent_workers=persistent_workers)"""


class Rebuilt:
    """Makes loaders like one that a user has, with other loader settings.

    Data set, sampler, `collate_fn`, `drop_last`, `timeout`, generator, `worker_init_fn` and
    multiprocessing context stay as they are. A custom batch sampler is copied and its
    `batch_size` set.

    Args:
        loader: The user's own.

    Attributes:
        stated_settings: The loader settings that the user has today.

    Raises:
        WorkloadInvalid: If its batch size cannot be changed from outside.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.loader = loader
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            kind = type(loader.batch_sampler or loader.dataset).__name__
            raise WorkloadInvalid(
                f"a DataLoader needs a batch size that can be set, but {kind} makes the batches "
                "and has no batch_size",
                hint=f"pass a function that makes the loader instead:\n\n{EXAMPLE_FACTORY}",
            )
        self.stated_settings: dict[str, Any] = {
            "batch_size": size,
            "num_workers": loader.num_workers,
            "prefetch_factor": loader.prefetch_factor,
            "pin_memory": loader.pin_memory,
            "persistent_workers": loader.persistent_workers,
        }

    def __call__(
        self,
        batch_size: int,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> Iterable[Any]:
        """Return a loader of the same data."""
        loader = self.loader
        return DataLoader(
            loader.dataset,
            **self._batching(batch_size),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context if num_workers else None,
            generator=loader.generator,
        )

    def _batching(self, batch_size: int) -> dict[str, Any]:
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset):
            return {"batch_size": batch_size, "drop_last": loader.drop_last}
        if type(loader.batch_sampler) in (BatchSampler, type(None)):
            return {
                "batch_size": batch_size,
                "sampler": loader.sampler,
                "drop_last": loader.drop_last,
            }
        batch_sampler = copy.copy(loader.batch_sampler)
        batch_sampler.batch_size = batch_size  # type: ignore[union-attr]  # it has one, as asked
        return {"batch_sampler": batch_sampler}


class FromDataset:
    """Makes loaders of a data set: shuffled where it has an order, as it comes where it has none.

    Args:
        dataset: Map-style or iterable.
    """

    def __init__(self, dataset: "Dataset[Any]") -> None:
        self.dataset = dataset

    def __call__(
        self,
        batch_size: int,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> Iterable[Any]:
        """Return a loader of the data set."""
        return DataLoader(
            self.dataset,
            batch_size=batch_size,
            shuffle=None if isinstance(self.dataset, IterableDataset) else True,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
        )
