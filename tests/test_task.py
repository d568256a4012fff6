"""What a search is asked."""

from simulations import BLOCKS, Simulation, workload

from autotune.knobs import CHECKPOINTING
from autotune.space import Config


def test_the_default_number_of_threads_is_the_devices() -> None:
    """A config that leaves its threads open runs with those of PyTorch there."""
    task = Simulation().task

    assert task.threads_of(Config(batch_size=1)) == 2
    assert task.threads_of(Config(batch_size=1, threads=1)) == 1


def test_checkpointing_is_searched_from_its_ends() -> None:
    """The least and the most that is recomputed, in each precision; the rest is between."""
    facts = workload(blocks=BLOCKS, checkpointing=CHECKPOINTING[1:])
    task = Simulation(workload=facts, space={"amp": ["off"]}).task
    config = Config(batch_size=1, checkpointing="alternate")

    assert task.cells() == (("off", "full"), ("off", "off"))
    assert [kind for _, kind in task.cells_between()] == list(CHECKPOINTING[1:-1])
    assert [each.checkpointing for each in task.cheaper(config)] == list(CHECKPOINTING[:3])


def test_a_split_changes_batch_size_and_accumulation() -> None:
    """Nothing else of the config."""
    task, config = Simulation().task, Config(batch_size=32, amp="bf16")

    assert task.with_split(config, (8, 4)) == Config(batch_size=8, accumulation_steps=4, amp="bf16")
