"""Where files live: a folder (``file://``) or a prefix in a bucket (``s3://``).

Keys are relative, ``/``-separated and never user-given text as such (see :func:`safe_name`). A write
replaces one object whole or leaves the old one: by rename in a folder, by PUT (or a completed multipart
upload) in S3. Failures are :class:`PublishError`, naming the object and what to do about it.

**Two writers.** What several runs change is written with :meth:`Store.write_if`: only if the object is
still the version that was read, else :class:`WriteConflict`. In a folder a lock makes it so, in S3 the
conditions ``If-Match`` and ``If-None-Match``. An S3 look-alike that does not know these conditions either
says so or ignores them; :meth:`Store.conditional` finds out which, and then two runs that publish in the
same moment can lose one's change."""

from __future__ import annotations

import fcntl
import hashlib
import io
import logging
import mimetypes
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from include.capacity.errors import ConfigError, PublishError, StoreAway, WriteConflict
from include.capacity.redact import redact_text

log = logging.getLogger(__name__)

CONTENT_TYPES = {
    ".parquet": "application/vnd.apache.parquet",
    ".md": "text/markdown; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".csv": "text/csv; charset=utf-8",
    ".json": "application/json",
    ".yaml": "application/yaml",
    ".svg": "image/svg+xml",
}


MULTIPART_FROM_BYTES = 16 * 1024 * 1024
"""Bodies from this size on are uploaded in parts."""

PATIENCE: dict[str, Any] = {
    "connect_timeout": 10,
    "read_timeout": 60,
    "retries": {"mode": "standard", "total_max_attempts": 5},
}
"""botocore settings of our clients: bounded waits, five attempts with growing pauses."""
ENDPOINT_ENV = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

MAX_NAME = 160
PART = "~part~"
"""How half-written files begin; no :func:`safe_name` does."""

REFUSED = frozenset(
    {
        "403",
        "AccessDenied",
        "ExpiredToken",
        "Forbidden",
        "InvalidAccessKeyId",
        "InvalidToken",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
"""S3 error codes that mean: these credentials may not do this."""


CONFLICTS = frozenset({"PreconditionFailed", "412", "ConditionalRequestConflict", "409"})
"""S3 error codes that mean: the object is not what the condition says."""
NO_CONDITIONS = frozenset({"NotImplemented", "501"})
"""... this server knows no conditions."""


class Store(Protocol):
    """A flat space of immutable-or-replaced-whole objects."""

    url: str

    def read(self, key: str) -> bytes:
        """The object's bytes; FileNotFoundError if there is none."""

    def write(self, key: str, data: bytes) -> None:
        """Replace the object whole."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that start with ``prefix``, sorted."""

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""

    def read_version(self, key: str) -> tuple[bytes, str]:
        """(bytes, a mark of this version); FileNotFoundError if there is none."""

    def write_if(self, key: str, data: bytes, version: str | None) -> None:
        """Replace the object whole if it still is ``version`` (None: there is none), else WriteConflict."""

    def conditional(self, key: str) -> bool:
        """Whether ``write_if`` keeps its word; ``key``: an object that exists, which is left as it is."""


def open_store(
    url: str,
    s3_client: Callable[[], Any] | None = None,
    *,
    sse: str | None = None,
    sse_kms_key_id: str | None = None,
) -> Store:
    """A store for ``file:///path``, a plain path, or ``s3://bucket/prefix``.

    ``s3_client`` makes the boto3 client (from an Airflow connection); without one, boto3's own
    configuration (environment, profile) is used. Server-side encryption: ``sse`` (AES256, aws:kms or
    aws:kms:dsse) and the key's id, or in the URL, which goes before: ``s3://bucket/prefix?sse=AES256``.
    ConfigError if the URL is none of these.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise ConfigError(f"{url!r}: expected s3://bucket/prefix, found no bucket")
        asked = _encryption(url, parts.query) or {"sse": sse, "sse_kms_key_id": sse_kms_key_id}
        return S3Store(parts.netloc, parts.path.strip("/"), s3_client, **asked)
    if parts.scheme in ("", "file"):
        return FolderStore(Path(unquote(parts.path) if parts.scheme else url))
    raise ConfigError(f"{url!r}: expected file:///path or s3://bucket/prefix")


def open_object(url: str, s3_client: Callable[[], Any] | None = None) -> tuple[Store, str]:
    """(store, key) of the object that ``url`` names; key "" where it names a folder, a prefix or nothing."""
    store = open_store(url, s3_client)
    if isinstance(store, FolderStore):
        root = store.root.resolve()
        return (FolderStore(root.parent), root.name) if root.is_file() else (store, "")
    above, _, name = url.rstrip("/").rpartition("/")
    if not above.endswith("/"):  # not a bucket alone
        parent = open_store(above, s3_client)
        if parent.exists(name):
            return parent, name
    return store, ""


def _encryption(url: str, query: str) -> dict[str, str | None]:
    """The encryption that a URL's query asks for; ConfigError for anything else in it."""
    found: dict[str, str | None] = {
        key: values[-1] for key, values in parse_qs(query, keep_blank_values=True).items()
    }
    if unknown := sorted(set(found) - {"sse", "sse_kms_key_id"}):
        raise ConfigError(f"{url!r}: unknown {unknown}; expected sse or sse_kms_key_id after the '?'")
    if "sse" in found and found["sse"] not in ("AES256", "aws:kms", "aws:kms:dsse"):
        raise ConfigError(f"{url!r}: sse={found['sse']!r}; expected AES256, aws:kms or aws:kms:dsse")
    return found


def default_s3_client() -> Any:
    """A boto3 client from the environment, as patient as :data:`PATIENCE` says.

    With an endpoint of its own (``AWS_ENDPOINT_URL``), buckets are addressed by path and checksums sent
    only where required, which S3 look-alikes need.
    """
    import boto3  # heavy: only where S3 is used
    from botocore.config import Config

    config = Config(**PATIENCE)
    if any(os.environ.get(name) for name in ENDPOINT_ENV):
        config = config.merge(
            Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            )
        )
    return boto3.Session().client(
        "s3", config=config
    )  # boto3's own session keeps the credentials it saw first


def safe_name(text: str) -> str:
    """``text`` as one path or key segment: no separator, no dot segment, no case to lose.

    Distinct texts give distinct names: what is not in ``[a-z0-9._-]`` is written as ``~hex~``. A name
    too long for a file (255 bytes) is cut and gets a digest of the text.
    """
    name = re.sub(r"[^a-z0-9._-]", lambda match: f"~{ord(match.group()):x}~", text)
    if not name.strip("."):
        name = "~2e~" * len(name) if name else "~~"
    if len(name) > MAX_NAME:
        name = f"{name[:MAX_NAME]}~~{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:32]}"
    return name


def content_type(key: str) -> str:
    """The MIME type an object is served with."""
    suffix = Path(key).suffix
    return CONTENT_TYPES.get(suffix) or mimetypes.guess_type(key)[0] or "application/octet-stream"


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file whole, by rename, or leave the old one; makes its folder. OSError if it cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=PART, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class FolderStore:
    """Files below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()

    def path(self, key: str) -> Path:
        """Where the object lies; ConfigError if ``key`` would leave the folder."""
        path = (self.root / key).resolve()
        if not path.is_relative_to(self.root.resolve()):
            raise ConfigError(f"key {key!r} leads out of {self.root}")
        return path

    def read(self, key: str) -> bytes:
        return self.path(key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        path = self.path(key)
        try:
            replace_file(path, [data])
        except OSError as error:
            raise PublishError(f"{path}: cannot be written: {error.strerror or error}") from error

    def keys(self, prefix: str = "") -> list[str]:
        base = self.root / prefix.rpartition("/")[0]
        found = (path for path in base.rglob("*") if path.is_file() and not path.name.startswith(PART))
        relative = (path.relative_to(self.root).as_posix() for path in found)
        return sorted(key for key in relative if key.startswith(prefix))

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def delete(self, key: str) -> None:
        path = self.path(key)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise PublishError(f"{path}: cannot be removed: {error.strerror or error}") from error

    def read_version(self, key: str) -> tuple[bytes, str]:
        data = self.read(key)
        return data, hashlib.sha256(data).hexdigest()

    def write_if(self, key: str, data: bytes, version: str | None) -> None:
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = (path.parent / f"{PART}lock").open("w")
        except OSError as error:
            raise PublishError(f"{path}: cannot be written: {error.strerror or error}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            now = self.read_version(key)[1] if path.is_file() else None
            if now != version:
                raise WriteConflict(f"{path}: changed by another run since it was read")
            self.write(key, data)

    def conditional(self, key: str) -> bool:
        del key
        return True


class S3Store:
    """Objects below a prefix of a bucket; retries with backoff are boto3's (configured by its client)."""

    def __init__(
        self,
        bucket: str,
        prefix: str,
        client: Callable[[], Any] | None,
        sse: str | None = None,
        sse_kms_key_id: str | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._make_client = client
        self._client: Any = None
        encryption = {"ServerSideEncryption": sse, "SSEKMSKeyId": sse_kms_key_id}
        self._extra = {name: value for name, value in encryption.items() if value}

    @property
    def client(self) -> Any:
        """The boto3 client, made when first needed."""
        if self._client is None:
            with self._explained(""):
                self._client = (self._make_client or default_s3_client)()
        return self._client

    def read(self, key: str) -> bytes:
        with self._explained(key):
            return self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)["Body"].read()

    def delete(self, key: str) -> None:
        with self._explained(key):
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + key)

    def read_version(self, key: str) -> tuple[bytes, str]:
        with self._explained(key):
            answer = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)
            return answer["Body"].read(), str(answer["ETag"])

    def write_if(self, key: str, data: bytes, version: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            with self._explained(key):
                self._put(key, data, **condition)
        except _NoConditions:
            log.warning("%s knows no conditional writes; %s is replaced without", self.url, key)
            self.write(key, data)
        except FileNotFoundError as error:  # the version that was read is gone
            raise WriteConflict(f"{self.url}/{key}: removed by another run since it was read") from error

    def conditional(self, key: str) -> bool:
        """Asked by writing the object's own bytes again on condition that there is none."""
        data = self.read(key)
        try:
            with self._explained(key):
                self._put(key, data, IfNoneMatch="*")
        except WriteConflict:
            return True
        except _NoConditions:
            return False
        return False

    def write(self, key: str, data: bytes) -> None:
        with self._explained(key):
            if len(data) < MULTIPART_FROM_BYTES:
                self._put(key, data)
            else:
                from boto3.s3.transfer import TransferConfig

                self.client.upload_fileobj(
                    io.BytesIO(data),
                    Bucket=self.bucket,
                    Key=self.prefix + key,
                    ExtraArgs={"ContentType": content_type(key), **self._extra},
                    Config=TransferConfig(multipart_threshold=MULTIPART_FROM_BYTES, max_concurrency=4),
                )

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        self.client.put_object(
            Bucket=self.bucket,
            Key=self.prefix + key,
            Body=data,
            ContentType=content_type(key),
            **self._extra,
            **condition,
        )

    def keys(self, prefix: str = "") -> list[str]:
        with self._explained(prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + prefix
            )
            found = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return sorted(key[len(self.prefix) :] for key in found)

    def exists(self, key: str) -> bool:
        try:
            with self._explained(key):
                self.client.head_object(Bucket=self.bucket, Key=self.prefix + key)
        except FileNotFoundError:
            return False
        return True

    def _explained(self, key: str) -> _Explained:
        return _Explained(f"s3://{self.bucket}/{self.prefix}{key}")


class _NoConditions(PublishError):
    """This server says that it knows no conditional writes."""


class _Explained:
    """Turns botocore's errors into ours, naming the object."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import (
            BotoCoreError,
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
        )

        if isinstance(error, Boto3Error) and isinstance(error.__cause__ or error.__context__, Exception):
            error = error.__cause__ or error.__context__  # a multipart upload's own wrapper
        told = redact_text(str(error))
        if isinstance(error, ClientError):
            code = str(error.response.get("Error", {}).get("Code", ""))
            if code in ("NoSuchKey", "404", "NotFound"):
                raise FileNotFoundError(self.url) from error
            if code in CONFLICTS:
                raise WriteConflict(f"{self.url}: changed by another run since it was read") from error
            if code in NO_CONDITIONS:
                raise _NoConditions(f"{self.url}: not known to the object store: {error}") from error
            if code == "NoSuchBucket":
                raise PublishError(f"{self.url}: the bucket does not exist; create it first") from error
            if code in REFUSED:
                raise PublishError(
                    f"{self.url}: the object store refused the credentials ({code}); check the connection's "
                    "key and secret, and that they may list, read and write this bucket"
                ) from error
            if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500:
                raise StoreAway(f"{self.url}: the object store failed: {told}") from error
            raise PublishError(f"{self.url}: refused by the object store: {told}") from error
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            raise PublishError(
                f"{self.url}: no credentials for the object store; set them in the Airflow connection, "
                "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        if isinstance(error, BotoCoreError | Boto3Error):
            raise StoreAway(
                f"{self.url}: the object store cannot be reached: {told}; check its address"
            ) from error
