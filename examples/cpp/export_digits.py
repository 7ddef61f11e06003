"""Write scikit-learn's digits (1,797 images of 8 x 8) as the four IDX files that train_classifier reads.

python export_digits.py digits/
train_classifier --data-dir digits --target 0.05
"""

import argparse
import struct
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write_idx(path: Path, values: np.ndarray) -> None:
    """Header: two zero bytes, the type (8 = uint8), the order and each dimension, big-endian."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)

    digits = load_digits()
    is_test = np.arange(len(digits.target)) % 5 == 0
    for name, chosen in (("train", ~is_test), ("t10k", is_test)):
        write_idx(folder / f"{name}-images-idx3-ubyte", digits.images[chosen])
        write_idx(folder / f"{name}-labels-idx1-ubyte", digits.target[chosen])


if __name__ == "__main__":
    main()
