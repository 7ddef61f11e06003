"""The King James Bible from Debian's package bible-kjv-text: 4,404,412 characters.

One verse per line, as the package's program prints it: "Ge1:1 In the beginning God created ...".
"""

from __future__ import annotations

import hashlib
import io
import itertools
import lzma
import struct
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

# The package's data file.
SYSTEM_FILE = Path("/usr/lib/bible.data")
MEMBER = "./usr/lib/bible.data"
URL = "http://deb.debian.org/debian/pool/main/b/bible-kjv/bible-kjv-text_4.38_all.deb"
URL_SHA256 = "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a"
TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"
TEXT_NAME = "bible-kjv.txt"
TIMEOUT_SECONDS = 30

CLEAR = 256  # the code that clears the table
MOST_BITS = 16


def load_bible(folder: Path) -> bytes:
    """Load the text, ASCII: from `folder`, the installed package, or Debian's servers. The last two are saved
    to `folder` as bible-kjv.txt.

    Raises:
        FileNotFoundError: the text is in none of these places, or differs from the expected one.
    """
    path = folder / TEXT_NAME
    if path.is_file():
        return checked(path.read_bytes(), path)
    if SYSTEM_FILE.is_file():
        text = checked(decoded(SYSTEM_FILE.read_bytes()), SYSTEM_FILE)
    else:
        text = checked(decoded(unpacked(downloaded(folder))), URL)
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so an interrupted run leaves no partial file under this name.
    partial = path.with_suffix(".part")
    partial.write_bytes(text)
    partial.rename(path)
    return text


def checked(text: bytes, source: object) -> bytes:
    if hashlib.sha256(text).hexdigest() != TEXT_SHA256:
        raise FileNotFoundError(
            f"{source} holds another text than bible-kjv-text 4.38: its SHA-256 sum differs."
        )
    return text


def downloaded(folder: Path) -> bytes:
    print(f"Downloading {URL}", file=sys.stderr)
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT_SECONDS) as response:
            package: bytes = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise FileNotFoundError(
            f"The Debian package bible-kjv-text is not installed and {URL} cannot be downloaded "
            f"({error}). Install it, or put the output of `bible -f gen1:1-rev22:21` into "
            f"{folder / TEXT_NAME}."
        ) from error
    if hashlib.sha256(package).hexdigest() != URL_SHA256:
        raise FileNotFoundError(f"{URL} is not the published file: its SHA-256 sum differs.")
    return package


def unpacked(package: bytes) -> bytes:
    """The file bible.data of a .deb, which is an `ar` archive that contains a compressed tar."""
    position = len(b"!<arch>\n")
    while position < len(package):
        # name (16), date, owner, group, mode, size (10), end: 60 bytes; contents at even offsets
        name = package[position : position + 16].decode().rstrip(" /")
        size = int(package[position + 48 : position + 58])
        position += 60
        if name == "data.tar.xz":
            content = lzma.decompress(package[position : position + size])
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                member = archive.extractfile(MEMBER)
                assert member is not None
                return member.read()
        position += size + size % 2
    raise FileNotFoundError(f"{URL} holds no data.tar.xz.")


def decoded(data: bytes) -> bytes:
    """The text in bible.data: windows of 64 KB, each compressed separately.

    Big-endian at 0x58: the number of windows, the end of each, and the end of the file. A line with the
    edition precedes the first verse.
    """
    (windows,) = struct.unpack_from(">I", data, 0x58)
    starts = struct.unpack_from(f">{windows + 1}I", data, 0x5C)
    text = b"".join(lzw(data[a:b]) for a, b in itertools.pairwise(starts))
    return text[text.index(b"\n") + 1 :]


def lzw(data: bytes) -> bytes:
    """Undo Unix's compress (without its header): codes of 9 to 16 bits, least significant bit first.

    Welch, "A Technique for High-Performance Data Compression", 1984.
    """
    table = [bytes([i]) for i in range(256)] + [b""]
    entries: list[bytes] = []
    width, position, start, last = 9, 0, 0, b""
    while position + width <= 8 * len(data):
        low = position >> 3
        code = int.from_bytes(data[low : low + 4], "little") >> (position & 7) & (1 << width) - 1
        position += width
        if code == CLEAR:
            # Codes come in groups of eight; the rest of a group is padding.
            group = 8 * width
            position = start = start - (start - position) // group * group
            width, last = 9, b""
            del table[257:]
            continue
        entry = table[code] if code < len(table) else last + last[:1]
        if last and len(table) < 1 << MOST_BITS:
            table.append(last + entry[:1])
        entries.append(entry)
        last = entry
        if len(table) == 1 << width and width < MOST_BITS:
            width += 1
            start = position
    return b"".join(entries)
