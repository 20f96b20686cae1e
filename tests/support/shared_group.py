"""A process group of torch in shared memory, for ranks that are forked on one machine.

gloo's threads exchange many small messages: an ``all_reduce`` of four ranks on two cores takes
40 switches between threads and 2 ms of CPU in each rank. Here a rank writes its part into memory
that all ranks map, waits once for the others, and reads their parts.

`install` puts it in gloo's place: what a framework asks of gloo, it gets from this group.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import pickle
import select
import socket
import struct
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, ReduceOp, _create_work_from_future
from torch.distributed import distributed_c10d
from torch.futures import Future

PART_BYTES = 1 << 20  # what a rank exchanges at a time; memory that nobody writes costs nothing
MESSAGE_BYTES = 60_000
BYTES = torch.uint8
CPU = torch.device("cpu")
GLOO = distributed_c10d.ProcessGroupGloo


def install() -> None:
    """Have torch build a `SharedGroup` wherever it would build gloo's group.

    Before 2.13, torch calls some methods of groups by other names: it keeps gloo.
    """
    if hasattr(dist.ProcessGroup, "all_gather_single"):
        distributed_c10d.ProcessGroupGloo = SharedGroup


class Received(dist.Work):
    """A message that is taken when it is waited for."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._take: Callable[[], None] | None = take

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Take the message."""
        if self._take is not None:
            take, self._take = self._take, None
            take()
        return True


REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Any]] = {
    ReduceOp.SUM: Tensor.add_,
    ReduceOp.AVG: Tensor.add_,
    ReduceOp.PRODUCT: Tensor.mul_,
    ReduceOp.MIN: lambda total, more: torch.minimum(total, more, out=total),
    ReduceOp.MAX: lambda total, more: torch.maximum(total, more, out=total),
    ReduceOp.BAND: Tensor.bitwise_and_,
    ReduceOp.BOR: Tensor.bitwise_or_,
    ReduceOp.BXOR: Tensor.bitwise_xor_,
}


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


def _collective(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method to its end without autograd, and return work that is done."""

    @functools.wraps(function)
    def run(group: SharedGroup, *arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            return _done(function(group, *arguments, **options))

    return run


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(BYTES)


def _fill(target: Tensor, content: Tensor) -> None:
    """Copy bytes into a tensor of any strides."""
    target.detach().copy_(content.clone().view(target.dtype).view(target.shape))


class SharedGroup(dist.ProcessGroup):
    """Ranks that exchange tensors through one mapping, and wait for each other at sockets."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.options = SimpleNamespace()
        unknown = FakeProcessGroup.Options()
        unknown.error_on_collective = True  # for what is not defined here
        backend = FakeProcessGroup._create_internal(rank, size, unknown)
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._me, self._count, self._turn = rank, size, 0
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._asked: dict[tuple[int, int], deque[list[Tensor]]] = defaultdict(deque)
        if size == 1:
            return
        if rank == 0:
            memory = os.memfd_create("ranks")
            os.truncate(memory, 2 * size * PART_BYTES)
            self._name = uuid.uuid4().hex
            with self._bind("meet", socket.SOCK_STREAM) as door:
                door.listen(size)
                store.set("shared", pickle.dumps((self._name, f"/proc/{os.getpid()}/fd/{memory}")))
                self._peers = [door.accept()[0] for _ in range(1, size)]
        else:
            self._name, place = pickle.loads(store.get("shared"))
            memory = os.open(place, os.O_RDWR)
            self._peers = [socket.socket(socket.AF_UNIX)]
            self._peers[0].connect(self._address("meet", 0))
        self._messages = self._bind("message", socket.SOCK_DGRAM)
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)
        for each in (*self._peers, self._messages):
            each.settimeout(timeout.total_seconds())
        self._parts = torch.frombuffer(mmap.mmap(memory, 0), dtype=BYTES).view(2, size, PART_BYTES)
        self._meet()
        os.close(memory)

    def _address(self, kind: str, rank: int) -> str:
        return f"\0{self._name}-{kind}-{rank}"

    def _bind(self, kind: str, form: int) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, form)
        made.bind(self._address(kind, self._me))
        return made

    def _meet(self, nbytes: int = 0) -> None:
        """Wait until all ranks are here: rank 0 hears each, and answers.

        Raises:
            ConnectionError: another rank has ended, or has another number of bytes to exchange.
        """
        mine = struct.pack("q", nbytes)
        if self._me:
            self._peers[0].send(mine)
        for peer in self._peers:
            theirs = peer.recv(len(mine))
            if theirs != mine:
                what = f"exchanges {theirs!r} bytes, not {mine!r}" if theirs else "has ended"
                raise ConnectionError(f"another rank {what}")
        if not self._me:
            for peer in self._peers:
                peer.send(mine)

    def _exchange(self, mine: Tensor) -> Tensor:
        """Return the parts of all ranks, which have as many bytes each.

        Each exchange uses the other half of the memory: a rank that writes there again has met the
        others since, when they had read it.
        """
        if self._count == 1:
            return mine.view(1, -1)
        found = torch.empty(self._count, mine.numel(), dtype=BYTES)
        with self._lock:
            for start in range(0, mine.numel(), PART_BYTES):
                part = mine[start : start + PART_BYTES]
                here = self._parts[self._turn]
                here[self._me, : part.numel()] = part
                self._meet(mine.numel())
                found[:, start : start + PART_BYTES] = here[:, : part.numel()]
                self._turn = 1 - self._turn
        return found

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        parts = self._exchange(_bytes(tensor))
        total, *others = (part.clone().view(tensor.dtype) for part in parts)
        for other in others:
            REDUCTIONS[operation.op](total, other)
        return total.div_(self._count) if operation == ReduceOp.AVG else total

    # What torch calls

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return another name than gloo's, whose class DDP expects behind it."""
        return "shared"

    def _set_sequence_number_for_group(self) -> None:
        """Count nothing."""

    def shutdown(self) -> None:
        """Close the sockets."""
        if self._count > 1:
            for each in (*self._peers, self._messages, self._sender):
                each.close()

    @_collective
    def barrier(self, opts: Any = None) -> None:
        """Wait for all ranks."""
        if self._count > 1:
            with self._lock:
                self._meet()

    def monitored_barrier(self, *_arguments: Any, **_options: Any) -> None:
        """Wait for all ranks."""
        self.barrier()

    @_collective
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> list[Tensor]:
        """Reduce each tensor over all ranks."""
        for tensor in tensors:
            tensor.detach().copy_(self._reduce(tensor, opts.reduceOp).view(tensor.shape))
        return tensors

    allreduce_coalesced = allreduce

    @_collective
    def reduce(self, tensors: list[Tensor], opts: Any) -> list[Tensor]:
        """Reduce each tensor on one rank."""
        for tensor in tensors:
            total = self._reduce(tensor, opts.reduceOp)
            if self._me == opts.rootRank:
                tensor.detach().copy_(total.view(tensor.shape))
        return tensors

    @_collective
    def broadcast(self, tensors: list[Tensor], opts: Any) -> list[Tensor]:
        """Send one rank's tensors to all."""
        for tensor in tensors:
            _fill(tensor, self._exchange(_bytes(tensor))[opts.rootRank])
        return tensors

    @_collective
    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> list[list[Tensor]]:
        """Give every rank the tensors of all."""
        for targets, tensor in zip(outputs, inputs, strict=True):
            for target, content in zip(targets, self._exchange(_bytes(tensor)), strict=True):
                _fill(target, content)
        return outputs

    @_collective
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> list[list[Tensor]]:
        """Give every rank the tensors of all; the outputs are by rank."""
        for number, tensor in enumerate(inputs):
            for targets, content in zip(outputs, self._exchange(_bytes(tensor)), strict=True):
                _fill(targets[number], content)
        return outputs

    @_collective
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> list[Tensor]:
        """Give every rank the tensors of all, in one tensor each."""
        for target, tensor in zip(outputs, inputs, strict=True):
            _fill(target, self._exchange(_bytes(tensor)).view(-1))
        return outputs

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Give every rank the tensors of all, in one tensor."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    @_collective
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Give one rank the tensors of all."""
        (tensor,) = inputs
        parts = self._exchange(_bytes(tensor))
        if self._me == opts.rootRank:
            for target, content in zip(outputs[0], parts, strict=True):
                _fill(target, content)
        return outputs

    @_collective
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank one tensor of a rank."""
        (target,) = outputs
        mine = inputs[0] if self._me == opts.rootRank else [target] * self._count
        parts = self._exchange(torch.cat([_bytes(tensor) for tensor in mine]))[opts.rootRank]
        _fill(target, parts.view(self._count, -1)[self._me])
        return outputs

    @_collective
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Reduce a tensor for each rank over all ranks."""
        for target, tensors in zip(outputs, inputs, strict=True):
            whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            reduced = self._reduce(whole, opts.reduceOp)
            target.detach().copy_(reduced.view(self._count, -1)[self._me].view(target.shape))
        return outputs

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> list[Tensor]:
        """Reduce each tensor over all ranks, and give each rank its part."""
        for target, tensor in zip(outputs, inputs, strict=True):
            reduced = self._reduce(tensor, opts.reduceOp)
            target.detach().copy_(reduced.view(self._count, -1)[self._me].view(target.shape))
        return outputs

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks, and give each rank its part."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    @_collective
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Give each rank one tensor of every rank; their sizes may differ."""
        self._swap([_bytes(tensor) for tensor in inputs], outputs)
        return outputs

    @_collective
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Tensor:
        """Give each rank rows of every rank."""
        rows = [output_sizes or [output.shape[0] // self._count] * self._count]
        rows += [input_sizes or [tensor.shape[0] // self._count] * self._count]
        target = output if output.is_contiguous() else output.contiguous()
        targets, given = target.split(list(rows[0])), tensor.split(list(rows[1]))
        self._swap([_bytes(part) for part in given], targets)
        if target is not output:
            output.detach().copy_(target)
        return output

    def _swap(self, given: list[Tensor], targets: Sequence[Tensor]) -> None:
        sizes = torch.tensor([part.numel() for part in given])
        every = self._exchange(_bytes(sizes)).view(torch.int64)
        most = int(every.sum(1).max())
        mine = torch.zeros(most, dtype=BYTES)
        mine[: int(sizes.sum())] = torch.cat(given)
        for target, part, theirs in zip(targets, self._exchange(mine), every, strict=True):
            start = int(theirs[: self._me].sum())
            _fill(target, part[start : start + int(theirs[self._me])])

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Send a message, which the receiver takes whenever it asks for it."""
        (tensor,) = tensors
        content = bytes(_bytes(tensor).numpy())
        for start in range(0, max(1, len(content)), MESSAGE_BYTES):
            self._post(rank, (self._me, tag, content[start : start + MESSAGE_BYTES]))
        return _done(tensors)

    def _post(self, rank: int, message: tuple[int, int, bytes]) -> None:
        """Send, and take own messages while the receiver's queue is full."""
        packed, address = pickle.dumps(message), self._address("message", rank)
        while True:
            with contextlib.suppress(BlockingIOError):
                self._sender.sendto(packed, address)
                return
            if select.select([self._messages], [], [], 0.001)[0]:
                self._take_message()

    def _take_message(self) -> None:
        rank, tag, content = pickle.loads(self._messages.recv(2 * MESSAGE_BYTES))
        self._waiting[rank, tag].append(content)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Return work that takes the next message of a rank when it is waited for."""
        self._asked[rank, tag].append(tensors)
        return Received(functools.partial(self._take, tensors, rank, tag))

    def _take(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        """Take messages until these tensors have theirs: the order is that of `recv`."""
        asked = self._asked[rank, tag]
        while any(each is tensors for each in asked):
            (target,) = asked.popleft()
            content = b""
            while len(content) < target.numel() * target.element_size():
                while not self._waiting[rank, tag]:
                    self._take_message()
                content += self._waiting[rank, tag].popleft()
            if content:
                with torch.no_grad():
                    _fill(target, torch.frombuffer(bytearray(content), dtype=BYTES))
