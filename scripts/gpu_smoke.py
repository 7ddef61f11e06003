"""A few steps of every optimizer on odd shapes on a CUDA device; gpu_check.sh runs it under
compute-sanitizer, which makes it some hundred times slower: keep it small."""

import torch
import torchium

SHAPES = [(33, 17), (1, 7), (7, 1), (64,), (), (3, 5, 4)]


def main() -> None:
    torch.manual_seed(0)
    for name in torchium.get_available_optimizers():
        parameters = [torch.randn(shape, device="cuda", requires_grad=True) for shape in SHAPES]
        optimizer = torchium.create_optimizer(name, parameters, lr=0.01)
        for group in optimizer.param_groups:
            if "update_freq" in group:
                group["update_freq"] = 1  # so that each step computes roots
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        torch.cuda.synchronize()
        finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
        print(f"{name}: {'finite' if finite else 'NOT FINITE'}")
        assert finite


if __name__ == "__main__":
    main()
