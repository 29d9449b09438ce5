"""Gradients on the drive: they go there as backward produces them, and the step reads them."""

import logging
import weakref

import torch

from ._heap import note_freed
from ._subgroups import flat_as, letting_go, local, page_up

_log = logging.getLogger("tensorferry")


def norm_of(gradient, norm_type=2.0):
    """The norm of one gradient, in fp32 where that is more than the gradient has."""
    dtype = torch.float32 if gradient.dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)


def clip_scale(norm, max_norm):
    """By how much to multiply gradients of this norm, as torch.nn.utils.clip_grad_norm_ does."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class GradientStore:
    """The gradients of one optimizer's parameters, by shard.

    A gradient that comes when there is one already is added to it, as torch would, so micro-batches
    accumulate on the drive. Nothing but the gradient at hand and the buffers is in memory."""

    def __init__(self):
        self._optimizer = None
        self._numbers = {}  # param -> its part of the keys
        self._norms = {}  # param -> 2-norm of its stored gradient; those that have one
        self._scales = {}  # param -> what clipping has asked for, each time
        self._zeroed = set()  # params whose stored gradient counts as zero
        self._stepped = set()  # params that were stepped with their stored gradient
        self._warned = False
        self._hooks = []
        self._writes = []
        self._failed = None  # why the gradients are not complete

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
            if param.requires_grad:  # collect() takes those of a parameter that is thawed later
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

    def __len__(self):
        return len(self._norms)

    @property
    def failed(self):
        return self._failed is not None

    def has(self, shard):
        return shard.param in self._norms

    def collect(self):
        """Takes what is in memory still, because no hook has seen it, and waits for all writes."""
        for param in self._numbers:
            if param.grad is not None:
                self._take(param)
        for operation in self._writes:
            try:
                operation.wait()
            except OSError as error:
                self._failed = self._failed or error
        self._writes = []
        if self._failed is not None:
            raise RuntimeError(
                f"a gradient could not be written ({self._failed!r}); parameters and states are as "
                "they were: zero_grad() and compute the gradients again"
            ) from self._failed

    @torch.no_grad()
    @letting_go()
    def _take(self, param):
        if param.grad.layout != torch.strided:
            raise RuntimeError("gradients must be dense to go to the drive")
        gradient = local(param.grad)
        shards = self._optimizer()._shards[param]
        if not shards:  # it has no elements
            return
        whole = flat_as(gradient, shards[0].stride)
        try:
            if param in self._norms and param not in self._zeroed:
                self._warn_of_old_gradients(param)
                for shard in shards:
                    whole[shard.begin : shard.end].add_(self._fetch(shard).to(whole.device))
            self._scales.pop(param, None)
            self._zeroed.discard(param)
            self._norms[param] = norm_of(whole)
            for shard in shards:
                self._put(shard, whole[shard.begin : shard.end])
        except BaseException as error:
            self._failed = error
            raise
        # Those that have failed are asked by collect().
        self._writes = [w for w in self._writes if not w.done() or w.exception() is not None]
        nbytes = gradient.nbytes
        param.grad = gradient = whole = None
        note_freed(nbytes)

    def stepped(self):
        """Notes that the optimizer has stepped with what is stored."""
        self._stepped = set(self._norms)

    def _warn_of_old_gradients(self, param):
        if param in self._stepped and not self._warned:
            self._warned = True
            _log.warning(
                "a gradient is added to the one on the drive that has been stepped already; if it "
                "should not be, call zero_grad() of the optimizer: that of the model does not "
                "reach gradients on the drive"
            )

    # Each buffer is let go of before the next is taken: there may be but one.

    def _put(self, shard, gradient):
        memory = self._take_buffer(shard)
        memory[: self._nbytes(shard)].view(gradient.dtype).copy_(gradient)
        self._writes.append(self._space.put(self._key(shard), memory))

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
        if shard.param in self._zeroed:
            return gradient.zero_()
        for scale in self._scales.get(shard.param, ()):
            gradient.mul_(scale.to(gradient.device))
        return gradient

    @torch.no_grad()
    @letting_go()
    def clip(self, max_norm, norm_type):
        self.collect()
        if not self._norms:
            return torch.tensor(0.0)
        # As torch does it: each norm in the dtype of its gradient.
        norms = [self._norm(p, norm_type).to(p.dtype) for p in self._in_order()]
        norms = [norm.to(norms[0].device) for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        scale = clip_scale(total, max_norm)
        for param in self._norms:
            self._scales.setdefault(param, []).append(scale)
        return total

    def total_norm(self):
        """Of all gradients together."""
        norms = [self._norm(p, 2.0) for p in self._in_order()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)

    def _in_order(self):
        """Parameters that have a gradient, in their order: backward brings them in another, and
        sums depend on it."""
        params = [param for param in self._numbers if param in self._norms]
        if any(hasattr(param, "to_local") for param in params):
            raise NotImplementedError(
                "the norm of gradients on the drive is not known where parameters are distributed: "
                "leave offload_gradients out to clip them"
            )
        return params

    def _norm(self, param, norm_type):
        if norm_type == 2.0 and param not in self._scales:
            return self._norms[param]
        gradient = torch.empty(
            local(param).numel(), dtype=param.dtype, device=local(param).device
        )
        for shard in self._optimizer()._shards[param]:
            gradient[shard.begin : shard.end] = self._fetch(shard)
        return norm_of(gradient, norm_type)

    def zero(self):
        """Makes all gradients zero, as zero_grad(set_to_none=False) does."""
        self._zeroed = set(self._norms)
        self._norms = {param: torch.zeros_like(norm) for param, norm in self._norms.items()}
        self._scales = {}

    def drop(self):
        """Forgets all gradients, as zero_grad() does."""
        for param in self._norms:
            for shard in self._optimizer()._shards[param]:
                self._space.drop(self._key(shard))
        self._norms = {}
        self._scales = {}
        self._zeroed = set()
        self._stepped = set()
        self._writes = []
        self._failed = None
