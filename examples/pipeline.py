"""The pipeline of asynchronous offload by hand: weights are prefetched, gradients go to the drive.

    python examples/pipeline.py /mnt/nvme

While a layer computes, the next one is read and the gradients of the last are written. This is what
tensorferry.offload and tensorferry.optim do by themselves; here it is with nothing but a SwapSpace.
"""

import argparse

import tensorferry
import torch

LAYERS, WIDTH, STEPS, RATE = 6, 512, 5, 0.05


def tensor_in(buffer):
    return torch.frombuffer(buffer, dtype=torch.float32).view(WIDTH, WIDTH)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nvme_path", nargs="+", help="directories, one on each drive")
    options = parser.parse_args()
    torch.manual_seed(0)
    layer_bytes = 4 * WIDTH * WIDTH
    with tensorferry.SwapSpace(options.nvme_path, buffer_bytes=6 * layer_bytes) as space:
        for layer in range(LAYERS):
            space.put(f"weight {layer}", torch.randn(WIDTH, WIDTH) / WIDTH**0.5).wait()
        batch, goal = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
        for step in range(STEPS):
            # Forward: read the next layer while this one computes.
            inputs = [batch]
            for layer in range(LAYERS):
                buffer, arriving = space.fetch(f"weight {layer}")
                if layer + 1 < LAYERS:
                    space.prefetch(f"weight {layer + 1}")
                arriving.wait()
                inputs.append(torch.tanh(inputs[-1] @ tensor_in(buffer)))
                del buffer  # its room is free for the next
            error = inputs[-1] - goal
            print(f"step {step}: loss {error.square().mean():.4f}")
            # Backward: the gradient of a layer is written while the one before it computes.
            backward = 2 * error / error.numel()
            for layer in reversed(range(LAYERS)):
                buffer, arriving = space.fetch(f"weight {layer}")
                if layer > 0:
                    space.prefetch(f"weight {layer - 1}")
                backward = backward * (1 - inputs[layer + 1].square())
                space.put(f"gradient {layer}", inputs[layer].T @ backward)  # kept until written
                arriving.wait()
                backward = backward @ tensor_in(buffer).T
                del buffer
            # Step: one layer after the other, and back to the drive.
            for layer in range(LAYERS):
                weight, arriving = space.fetch(f"weight {layer}")
                gradient, coming = space.fetch(f"gradient {layer}")
                arriving.wait()
                coming.wait()
                tensor_in(weight).sub_(tensor_in(gradient), alpha=RATE * WIDTH)
                space.put(f"weight {layer}", weight)
                del weight, gradient
        moved = space.stats()
        print(
            f"{moved['read_bytes'] / 1e6:.0f} MB read, {moved['written_bytes'] / 1e6:.0f} MB "
            f"written, {moved['prefetched']} layers were prefetched"
        )


if __name__ == "__main__":
    main()
