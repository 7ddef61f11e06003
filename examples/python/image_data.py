"""Image classification data for the examples: Fashion-MNIST, or scikit-learn's digits."""

from __future__ import annotations

import gzip
import hashlib
import struct
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The folder of the Debian package dataset-fashion-mnist.
SYSTEM_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
DOWNLOAD_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
DOWNLOAD_TIMEOUT_SECONDS = 20

# The four files and their published MD5 sums (Xiao, Rasul, Vollgraf 2017).
FASHION_MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


@dataclass(frozen=True)
class ImageData:
    """Images float32 [N, 1, height, width] with mean 0 and deviation 1; labels int64 [N]."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    def to(self, device: torch.device) -> ImageData:
        """The same data on `device`."""
        return ImageData(
            self.name,
            self.train_images.to(device),
            self.train_labels.to(device),
            self.test_images.to(device),
            self.test_labels.to(device),
        )


def load_image_data(name: str, data_dir: Path | None, cache_dir: Path) -> ImageData:
    """Load "fashion-mnist", "digits", or with "auto" the first of the two that is available.

    Fashion-MNIST is searched in `data_dir` (the only place, if given), in the system's folder and in
    `cache_dir`. If not found, it is downloaded to `cache_dir`.

    Raises:
        FileNotFoundError: `data_dir` lacks a file, or Fashion-MNIST was requested by name and cannot be
        downloaded.
    """
    if name == "digits":
        return load_digits()
    try:
        return load_fashion_mnist(find_fashion_mnist(data_dir, cache_dir))
    except FileNotFoundError as error:
        if name == "fashion-mnist" or data_dir is not None:
            raise
        print(f"{error}\nUsing scikit-learn's bundled digits instead.", file=sys.stderr)
        return load_digits()


def find_fashion_mnist(data_dir: Path | None, cache_dir: Path) -> Path:
    """The folder with the four files of Fashion-MNIST."""
    if data_dir is not None:
        missing = [name for name in FASHION_MNIST_FILES if not (data_dir / name).is_file()]
        if missing:
            raise FileNotFoundError(f"--data-dir {data_dir} lacks {', '.join(missing)}.")
        return data_dir
    for folder in (SYSTEM_DIRECTORY, cache_dir):
        if all((folder / name).is_file() for name in FASHION_MNIST_FILES):
            return folder
    download_fashion_mnist(cache_dir)
    return cache_dir


def download_fashion_mnist(folder: Path) -> None:
    """Download the missing files of the four to `folder`; 30 MB in total."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, md5 in FASHION_MNIST_FILES.items():
        if (folder / name).is_file():
            continue
        url = f"{DOWNLOAD_URL}/{name}"
        print(f"Downloading {url}", file=sys.stderr)
        try:
            with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as response:
                content = response.read()
        except (urllib.error.URLError, OSError) as error:
            raise FileNotFoundError(
                f"Fashion-MNIST is not installed and {url} cannot be downloaded ({error}). "
                "Install the Debian package dataset-fashion-mnist, or pass --data-dir with the "
                "folder that holds the four .gz files."
            ) from error
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            raise FileNotFoundError(f"{url} is not the published file: its MD5 sum differs.")
        # Renamed when complete, so an interrupted run leaves no partial file under this name.
        partial = folder / f"{name}.part"
        partial.write_bytes(content)
        partial.rename(folder / name)


def load_fashion_mnist(folder: Path) -> ImageData:
    """Fashion-MNIST from its four .gz files: 60,000 + 10,000 images of 28 x 28."""
    arrays = [read_idx(folder / name) for name in FASHION_MNIST_FILES]
    return _standardised("fashion-mnist", *arrays)


def load_digits() -> ImageData:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; every fifth one is a test image."""
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.from_numpy(digits.images)
    labels = torch.from_numpy(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return _standardised(
        "digits", images[~is_test], labels[~is_test], images[is_test], labels[is_test]
    )


def read_idx(path: Path) -> Tensor:
    """Read a gzipped IDX file of unsigned bytes.

    The header is big-endian: two zero bytes, the type (8 = uint8), the number of dimensions, and each
    dimension as uint32.
    """
    content = gzip.decompress(path.read_bytes())
    zeros, dtype, order = struct.unpack_from(">HBB", content)
    if zeros != 0 or dtype != 8:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes.")
    shape = struct.unpack_from(f">{order}I", content, offset=4)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * order).view(shape)


def _standardised(
    name: str, train_images: Tensor, train_labels: Tensor, test_images: Tensor, test_labels: Tensor
) -> ImageData:
    train_images, test_images = train_images.float(), test_images.float()
    deviation, mean = torch.std_mean(train_images)
    return ImageData(
        name,
        ((train_images - mean) / deviation).unsqueeze(1),
        train_labels.long(),
        ((test_images - mean) / deviation).unsqueeze(1),
        test_labels.long(),
    )
