"""The files of a model's tokenizer as one message, for machines without the model. Imports no torch."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from specwire.core import ModelInfo
from specwire.errors import HandshakeError, InvalidRequestError, ModelLoadError
from specwire.text import tokenizer
from specwire.text.tokenizer import Tokenizer
from specwire.v1 import common_pb2

MAX_BYTES = 64 << 20
"""Of all files together; the largest tokenizers have about 40 MB."""
PAGE_BYTES = 1 << 20

_FURTHER_TEMPLATES = re.compile(r"additional_chat_templates/[\w-]+\.jinja")


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer.

    Attributes:
        data: a serialised `TokenizerFiles` message; empty without a tokenizer.
    """

    data: bytes = field(default=b"", repr=False)

    @property
    def hash(self) -> str:
        """SHA-256 in hexadecimal; empty without a tokenizer."""
        return hashlib.sha256(self.data).hexdigest() if self.data else ""

    def page(self, offset: int) -> bytes:
        """What is sent from there on; empty beyond the end, `InvalidRequestError` before the beginning."""
        if offset < 0:
            raise InvalidRequestError("offset", offset, "must be at least 0")
        return self.data[offset : offset + PAGE_BYTES]

    def load(self, name: str, *, chat_template: str = "") -> Tokenizer | None:
        """The tokenizer, as `tokenizer.load` makes it of the same files; None without one.

        The files are written to a temporary directory, which is removed again.

        Args:
            name: of the model, for errors.
            chat_template: instead of the model's own, if it has one (Jinja).

        Raises:
            ModelLoadError: the files are not those of a tokenizer, or cannot be written.
        """
        if not self.data:
            return None
        try:
            files = common_pb2.TokenizerFiles.FromString(self.data).files
        except DecodeError:
            raise ModelLoadError("the tokenizer's files were sent as no message of that type") from None
        try:
            with tempfile.TemporaryDirectory(prefix="specwire-tokenizer-") as directory:
                for file in files:
                    if file.name not in tokenizer.FILES and not _FURTHER_TEMPLATES.fullmatch(file.name):
                        raise ModelLoadError(f"the tokenizer has a file {file.name[:100]!r}, which none has")
                    path = Path(directory) / file.name
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(file.content)
                return tokenizer.load_from(Path(directory), f"of {name}", chat_template=chat_template)
        except OSError as error:
            problem = f"cannot be written to {tempfile.gettempdir()} ({error.strerror}); TMPDIR names another"
            raise ModelLoadError(f"the tokenizer of {name} {problem} directory") from None


NO_FILES = TokenizerFiles()


def read(source: str | Path) -> TokenizerFiles:
    """Those of a model's directory or hub id; `ModelLoadError` if it does not exist."""
    directory = tokenizer.directory_of(str(source))
    paths = [directory / name for name in tokenizer.FILES]
    paths += directory.glob("additional_chat_templates/*.jinja")
    found = sorted((str(path.relative_to(directory)), path.read_bytes()) for path in paths if path.is_file())
    files = [common_pb2.TokenizerFile(name=name, content=content) for name, content in found]
    return TokenizerFiles(common_pb2.TokenizerFiles(files=files).SerializeToString())


async def fetch(info: ModelInfo, page: Callable[[int], Awaitable[bytes]]) -> TokenizerFiles:
    """Those of a model that another process has, page by page.

    Args:
        info: what that process says of the model.
        page: asks for the bytes from an offset on.

    Raises:
        HandshakeError: there are more than `MAX_BYTES`, or other ones than announced; names `--tokenizer`.
        SpecwireError: what `page` raises.
    """
    if not info.tokenizer_source:
        return NO_FILES
    if not info.tokenizer_hash:
        raise _refusal(info, "is not sent by a service of that version")
    if info.tokenizer_bytes > MAX_BYTES:
        most = f"{MAX_BYTES >> 20} MiB"
        raise _refusal(info, f"has files of {info.tokenizer_bytes / (1 << 20):.1f} MiB, and {most} are taken")
    data = bytearray()
    while len(data) < info.tokenizer_bytes and (received := await page(len(data))):
        data += received
    files = TokenizerFiles(bytes(data))
    if (len(data), files.hash) != (info.tokenizer_bytes, info.tokenizer_hash):
        announced = f"{info.tokenizer_bytes} with {info.tokenizer_hash} were announced"
        raise _refusal(
            info, f"was received as {len(data)} bytes with the SHA-256 {files.hash}, and {announced}"
        )
    return files


def _refusal(info: ModelInfo, problem: str) -> HandshakeError:
    name = f"the tokenizer of {info.name}"
    return HandshakeError(f"{name} {problem}; --tokenizer names a directory or hub id that has it")
