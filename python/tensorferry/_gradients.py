"""Gradients on the drive: they go there as backward produces them, and the step reads them."""

import weakref

import torch

from ._subgroups import flat_as, local, page_up


class GradientStore:
    """The gradients of one optimizer's parameters, by shard.

    A gradient that comes when there is one already is added to it, as torch would, so micro-batches
    accumulate on the drive. Nothing but the gradient at hand and the buffers is in memory."""

    def __init__(self):
        self._optimizer = None
        self._numbers = {}  # param -> its part of the keys
        self._norms = {}  # param -> 2-norm of its stored gradient; those that have one
        self._scales = {}  # param -> what clipping has asked for
        self._hooks = []

    def attach(self, optimizer):
        self._optimizer = weakref.ref(optimizer)
        for group in optimizer.param_groups:
            self.watch(group["params"])

    def watch(self, params):
        """Takes the gradients of these parameters from now on."""
        store = weakref.ref(self)

        def take(param):
            if (own := store()) is not None:
                own._take(param)

        for param in params:
            self._numbers.setdefault(param, len(self._numbers))
            if param.requires_grad:  # collect() finds those of others, should they ever come
                self._hooks.append(param.register_post_accumulate_grad_hook(take))

    def detach(self):
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def _space(self):
        return self._optimizer()._space

    def _key(self, shard):
        return f"gradient/{self._numbers[shard.param]}/{shard.begin}"

    def _nbytes(self, shard):
        return (shard.end - shard.begin) * shard.param.dtype.itemsize

    def has(self, shard):
        return shard.param in self._norms

    def collect(self):
        """Takes what is in memory still, because no hook has seen it."""
        for param in self._numbers:
            if param.grad is not None:
                self._take(param)

    @torch.no_grad()
    def _take(self, param):
        if param.grad.layout != torch.strided:
            raise RuntimeError("gradients must be dense to go to the drive")
        gradient = local(param.grad)
        shards = self._optimizer()._shards[param]
        whole = flat_as(gradient, shards[0].stride)
        if param in self._norms:
            for shard in shards:
                whole[shard.begin : shard.end].add_(self._fetch(shard))
            self._scales.pop(param, None)
        self._norms[param] = torch.linalg.vector_norm(whole)
        for shard in shards:
            self._put(shard, whole[shard.begin : shard.end])
        self._optimizer()._forget_done_writes()
        param.grad = None

    # Each buffer is let go of before the next is taken: there may be but one.

    def _put(self, shard, gradient):
        memory = self._take_buffer(shard)
        memory[: self._nbytes(shard)].view(gradient.dtype).copy_(gradient)
        self._optimizer()._writes.append(self._space.put(self._key(shard), memory))

    def _fetch(self, shard):
        memory = self._take_buffer(shard)
        self.read(shard, memory).wait()
        return self.result(shard, memory)

    def _take_buffer(self, shard):
        buffer = self._space.take(page_up(self._nbytes(shard)))
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def read(self, shard, room):
        """Starts to read the gradient of a shard into a part of a buffer."""
        return self._space.get(self._key(shard), room[: page_up(self._nbytes(shard))])

    def result(self, shard, room):
        """What read() has brought, scaled as clipping has asked."""
        gradient = room[: self._nbytes(shard)].view(shard.param.dtype)
        if (scale := self._scales.get(shard.param)) is not None:
            gradient.mul_(scale.to(gradient.dtype))
        return gradient

    @torch.no_grad()
    def clip(self, max_norm, norm_type):
        self.collect()
        if not self._norms:
            return torch.tensor(0.0)
        norms = [self._norm(param, norm_type) for param in self._norms]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for param in self._norms:
            before = self._scales.get(param)
            self._scales[param] = scale if before is None else before * scale
        return total

    def _norm(self, param, norm_type):
        if norm_type == 2.0:
            norm = self._norms[param]
        else:
            shards = self._optimizer()._shards[param]
            parts = [torch.linalg.vector_norm(self._fetch(shard), norm_type) for shard in shards]
            return torch.linalg.vector_norm(torch.stack(parts), norm_type)
        scale = self._scales.get(param)
        return norm if scale is None else norm * scale

    def drop(self):
        """Forgets all gradients, as zero_grad() does."""
        for param in self._norms:
            for shard in self._optimizer()._shards[param]:
                self._space.drop(self._key(shard))
        self._norms = {}
        self._scales = {}
