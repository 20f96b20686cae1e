"""`shared_group` against gloo: every exchange has gloo's values."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.support import shared_group
from tests.trainer import worlds

LARGE = shared_group.PART_BYTES // 4 + 7


def numbers(rank, *shape):
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(rank)).float()


def exchange(ranks, group):
    """Return the result of each exchange; sums of integers are exact in any order."""
    rank, world = ranks.rank, ranks.world
    last = world - 1
    found = []
    for shape in ((3, 4), (LARGE,), (0,)):
        mine = numbers(rank, *shape)
        every = [torch.empty(shape) for _ in range(world)]
        dist.all_gather(every, mine, group=group)
        found += every
        if rank == last:
            dist.gather(mine, every, dst=last, group=group)
            found += every
        else:
            dist.gather(mine, dst=last, group=group)
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            found.append(mine.clone())
            dist.all_reduce(found[-1], operation, group=group)
        sent = mine.clone()
        dist.broadcast(sent, last, group=group)
        found.append(sent)
        total = mine.clone()
        dist.reduce(total, last, group=group)
        found += [total] * (rank == last)
    rows = numbers(rank, 2 * world, 5)
    whole, part, own = torch.empty(2 * world * world, 5), torch.empty(2, 5), torch.empty(2, 5)
    dist.all_gather_single(whole, rows, group=group)
    dist.reduce_scatter_single(part, rows.clone(), group=group)
    dist.scatter(own, list(rows.split(2)) if rank == last else None, src=last, group=group)
    swapped = torch.empty_like(rows)
    dist.all_to_all_single(swapped, rows, group=group)
    given = [1 + (rank + other) % 3 for other in range(world)]
    uneven = torch.empty(sum(given), 5)
    dist.all_to_all_single(uneven, numbers(rank, sum(given), 5), given, given, group=group)
    column = numbers(rank, 4, 3)
    dist.all_reduce(column.t(), group=group)
    flags = torch.tensor([rank == 0, True])
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
    half = numbers(rank, 6).bfloat16()
    dist.all_reduce(half, group=group)
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    found += [whole, part, own, swapped, uneven, column, flags, half]
    return [tensor.tolist() for tensor in found], objects


def talk(ranks):
    """Send more than a queue holds in both directions, in the order of two tags."""
    group, other = share(), 1 - ranks.rank
    messages = [numbers(ranks.rank + 2 * n, 40_000) for n in range(20)]
    works = [dist.isend(each, other, group, tag=n % 2) for n, each in enumerate(messages)]
    found = [torch.empty(40_000) for _ in messages]
    works += [dist.irecv(each, other, group, tag=n % 2) for n, each in enumerate(found)]
    for work in reversed(works):
        work.wait()
    wanted = [numbers(other + 2 * n, 40_000) for n in range(20)]
    return all(map(torch.equal, found, wanted))


def share():
    """Return a group of all ranks in shared memory."""
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", shared_group.SharedGroup):
        return dist.new_group()


def exchange_twice(ranks):
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", shared_group.GLOO):
        gloo = dist.new_group()
    return exchange(ranks, share()), exchange(ranks, gloo)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_exchange_has_the_values_of_gloo(world):
    for found, expected in worlds.run(world, exchange_twice):
        assert found == expected


def test_messages_arrive_in_the_order_of_each_tag():
    assert worlds.run(2, talk) == [True, True]


def end_early(ranks):
    group = share()
    if ranks.rank == 1:
        raise ValueError("rank 1 is gone")
    dist.barrier(group)


def test_a_rank_that_ends_ends_the_others():
    with pytest.raises(AssertionError, match="rank 1 is gone"):
        worlds.run(3, end_early)


def reduce_unequal(ranks):
    dist.all_reduce(torch.ones(3 + ranks.rank), group=share())


def test_unequal_sizes_are_refused():
    with pytest.raises(AssertionError, match="another rank exchanges"):
        worlds.run(2, reduce_unequal)


def reduce_in_threads(ranks):
    """Reduce in two groups at once, in another order on each rank."""
    groups = [share(), share()]
    sums = [torch.ones(1000) * (1 + n) for n in (0, 1)]

    def reduce(n):
        for _ in range(50):
            dist.all_reduce(sums[n], dist.ReduceOp.MAX, group=groups[n])

    threads = [threading.Thread(target=reduce, args=(n,)) for n in (0, 1)]
    for thread in threads[:: 1 - 2 * ranks.rank]:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(each.mean()) for each in sums]


def test_groups_do_not_wait_for_each_other():
    assert worlds.run(2, reduce_in_threads) == [[1.0, 2.0], [1.0, 2.0]]
