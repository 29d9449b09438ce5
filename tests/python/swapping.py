"""What the tests of SwapSpace share."""

KiB = 1 << 10
MiB = 1 << 20
# One small request at a time keeps a write in flight for as long as it takes.
SLOW = dict(queue_depth=1, block_bytes=4096, workers=1)


def got(space, key, offset=0, size=None):
    """The bytes of a tensor, or a part of them."""
    target = bytearray(space.size(key) - offset if size is None else size)
    space.get(key, target, offset).wait()
    return bytes(target)
