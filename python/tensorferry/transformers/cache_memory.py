"""Which layers have their keys and values in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .._core import Handle
from .._memory.buffers import NvmePath
from .._memory.gpu_pool import GpuPool
from .._memory.layout import PAGE, page_up
from .._memory.pinned_pool import PinnedPool
from .._memory.spreading import spread
from .._memory.weight_memory import WeightMemory
from .._tracing import span
from .cache_file import open_files
from .cache_states import States

# How long memory that a layer has given up may take to become free, if it must, and as a rule.
_RELEASE_SECONDS = 1.0
_SOON_SECONDS = 0.01
# Layers that pass through memory: one in use, one that is read.
_PASSING = 2


class CacheMemory:
    """Holds keys and values in so much memory, and the rest on the drive. Layers are used in turn:
    some stay in memory, spread evenly, and the others are read one or more ahead."""

    def __init__(
        self, layers: int, nvme_path: NvmePath, max_cpu_bytes: int, max_gpu_bytes: int | None
    ) -> None:
        self.states: list[States | None] = [None] * layers  # None before their first tokens
        self.handle = Handle()
        self.files = open_files(nvme_path)
        self._max_cpu_bytes = max_cpu_bytes
        self._max_gpu_bytes = max_gpu_bytes
        self._memory: WeightMemory | None = None
        self._ahead: set[States] = set()  # read ahead, and not used since
        self._staying: set[States] = set()
        self._planned: tuple[int, ...] = ()  # bytes of each layer when it was decided who stays
        self._unusable = ""  # why no layer can be used any more

    # --- layers ---

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Inside, layers change or move. After an error there, all that follows raises."""
        self.check_usable()
        try:
            yield
        except BaseException as error:
            self._unusable = (
                f"an earlier step of this NvmeCache has failed ({type(error).__name__}: {error}), "
                "and its layers may have different tokens: make a new one"
            )
            raise

    def check_usable(self) -> None:
        if self._unusable:
            raise RuntimeError(self._unusable)

    def open(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> States:
        """Makes the states of a layer, whose keys and values are like these."""
        states = States(self.handle, self.files[number % len(self.files)], keys, values)
        self.states[number] = states
        if self._memory is None:
            self._memory = self._take_memory(states.device)
        return states

    def _take_memory(self, device: torch.device) -> WeightMemory:
        if device.type == "cpu":
            return WeightMemory(PinnedPool(max(self._max_cpu_bytes // PAGE * PAGE, PAGE)))
        limit = self._max_cpu_bytes if self._max_gpu_bytes is None else self._max_gpu_bytes
        return WeightMemory(PinnedPool(PAGE), GpuPool(device, limit))

    def add(self, states: States, new: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """Adds tokens to a layer. Returns all its keys and values."""
        with self._step():
            self._bring(states, states.length + new[0].shape[2] + 1)  # and the next token
            states.append(new)
            if states not in self._staying:
                states.flush()
            return states.views()

    def views(self, states: States) -> list[torch.Tensor]:
        """Returns all keys and values of a layer."""
        with self._step():
            self._bring(states, states.length)
            return states.views()

    def crop(self, states: States, length: int) -> None:
        """Keeps so many tokens of a layer, the first ones."""
        with self._step():
            states.crop(length)

    def _bring(self, states: States, tokens: int) -> None:
        """Brings the tokens of a layer into memory, with room for so many, and starts to read the
        next layers."""
        self._ahead.discard(states)
        capacity = states.capacity_for(tokens)
        self._plan(states, capacity)
        if states.memory is None:
            states.load(self._take(states, capacity), capacity)
        self._read_ahead(states)
        with span("wait for keys and values"):
            states.wait()
        self._note_use(states)
        if states.capacity < capacity:
            self._grow(states, capacity)

    def replace(self, states: States, new: list[torch.Tensor]) -> None:
        """Gives a layer other keys and values."""
        capacity = states.capacity_for(new[0].shape[2] + 1)
        nbytes = states.bytes_for(capacity) // states.batch * new[0].shape[0]
        with self._step():
            states.forget()
            states.replace(new, self._take_bytes(states, nbytes), capacity)
            if states not in self._staying:
                states.flush()

    def _grow(self, states: States, capacity: int) -> None:
        nbytes = states.bytes_for(capacity)
        assert self._memory is not None
        memory = self._try(states, nbytes) if nbytes <= self._memory.nbytes else None
        if memory is None:  # not beside the old memory
            states.drop()
            states.load(self._take(states, capacity), capacity)
            states.wait()
        else:
            states.move(memory, capacity)

    def _note_use(self, states: States) -> None:
        assert self._memory is not None and states.memory is not None
        self._memory.note_use(states.memory)

    # --- who is in memory ---

    def _plan(self, states: States, capacity: int) -> None:
        """Decides which layers stay, if they do not all: as many as fit beside those that pass."""
        assert self._memory is not None
        here = states.bytes_for(capacity)
        sizes = {
            one: max(one.bytes_for(one.capacity_for(one.length + 1)), here if one is states else 0)
            for one in self.states
            if one is not None
        }
        known = list(sizes.values())
        # Layers that have no tokens yet will be like this one.
        total = sum(known) + here * (len(self.states) - len(known))
        planned = (*known, total)
        if planned == self._planned:
            return
        self._planned = planned
        room = self._memory.nbytes
        if total > room:
            room = max(room - _PASSING * max(*known, here), 0) * sum(known) // total
        self._staying = set(spread(list(sizes), sizes.__getitem__, room))

    def _take(self, states: States, capacity: int) -> torch.Tensor:
        return self._take_bytes(states, states.bytes_for(capacity))

    def _take_bytes(self, states: States, nbytes: int) -> torch.Tensor:
        assert self._memory is not None
        memory = None
        if nbytes <= self._memory.nbytes:  # a GPU would give more than that to whoever comes first
            memory = self._try(states, nbytes)
            if memory is None:
                memory = self._memory.take(nbytes, _RELEASE_SECONDS)
        if memory is None:
            raise RuntimeError(
                f"the keys and values of one layer take {nbytes} bytes, and the cache has "
                f"{self._memory.nbytes}: raise max_cpu_bytes (on a GPU: max_gpu_bytes)"
            )
        return memory

    def _try(self, states: States, nbytes: int) -> torch.Tensor | None:
        """Returns memory, of other layers if need be; None if all of them have gone."""
        assert self._memory is not None
        while (memory := self._memory.take(page_up(nbytes))) is None:
            victim = self._victim(states)
            if victim is None:
                return None
            self._evict(victim)
            memory = self._memory.take(page_up(nbytes), _SOON_SECONDS)
            if memory is not None:
                break
        return memory

    def _victim(self, states: States) -> States | None:
        """Returns the layer that goes first: one that does not stay, and of those the one that is
        needed last."""
        resident = [one for one in self._after(states) if one.memory is not None]
        for kind in (self._is_passing, lambda one: one not in self._ahead, lambda _: True):
            found = [one for one in resident if kind(one)]
            if found:
                return found[-1]
        return None

    def _is_passing(self, states: States) -> bool:
        return states not in self._staying and states not in self._ahead

    def _after(self, states: States) -> list[States]:
        """Returns the other layers in the order of their next use."""
        at = self.states.index(states)
        others = [*self.states[at + 1 :], *self.states[:at]]
        return [one for one in others if one is not None]

    def _evict(self, states: States) -> None:
        self._ahead.discard(states)
        states.wait()
        assert self._memory is not None and states.memory is not None
        self._memory.note_end(states.memory)
        states.drop()

    def _read_ahead(self, states: States) -> None:
        """Starts to read the next layers that are not in memory, as far as there is room."""
        assert self._memory is not None
        for coming in self._after(states):
            if coming.memory is not None or coming.length == 0:
                continue
            capacity = coming.capacity_for(coming.length + 1)
            nbytes = page_up(coming.bytes_for(capacity))
            memory = self._memory.take(nbytes)
            if memory is None:
                passing = [one for one in self._after(states) if one.memory is not None]
                passing = [one for one in passing if self._is_passing(one) and one.has_written()]
                if not passing:
                    return
                self._evict(passing[-1])
                memory = self._memory.take(nbytes, _SOON_SECONDS)
            if memory is None:
                return
            with self._memory.reading():
                coming.load(memory, capacity)
            self._ahead.add(coming)

    # --- the end ---

    def stats(self) -> dict[str, int]:
        known = [states for states in self.states if states is not None]
        handle = self.handle.stats()
        return {
            "state_bytes": sum(states.nbytes for states in known),
            "resident_bytes": sum(
                states.bytes_for(states.capacity) for states in known if states.memory is not None
            ),
            "drive_bytes": sum(file.used_bytes for file in self.files),
            "buffer_bytes": 0 if self._memory is None else self._memory.nbytes,
            "read_bytes": handle["read_bytes"],
            "written_bytes": handle["written_bytes"],
        }

    def close(self) -> None:
        self.handle.close()
        for states in self.states:
            if states is not None:
                states.end()
        for file in self.files:
            file.close()
        self.states, self.files, self._memory = [], [], None
        self._ahead, self._staying = set(), set()
        self._unusable = "this NvmeCache is closed: make a new one"
