"""How the environment says that an object store is reached: endpoint, region, credentials.

The environment, and not the configuration, because every command that takes the path of a cache
needs it, and because the stores' own tools read the same variables.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any

import tensorstore as ts

DRIVERS = {"s3": "s3", "gs": "gcs"}  # of TensorStore, by the scheme of a path
DEADLINE = 10.0  # seconds for a store's first answer
# Of every request that fails: a pause of 1, 2, 4 … 32 s before each; two minutes in all.
RETRIES = {"max_retries": 8, "initial_delay": "1s", "max_delay": "32s"}
NO_ANSWER = "retry attempts failed|PERMISSION_DENIED|UNAUTHENTICATED"  # in TensorStore's words
# Seconds until a connection that does not come, or through which nothing comes, counts as failed.
SILENCE = {
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "10",
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


def spec(driver: str, bucket: str, path: str) -> dict[str, Any]:
    """TensorStore's kvstore spec of the keys that begin with `path`."""
    found = {"driver": driver, "bucket": bucket, "path": path}
    if driver == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if url := endpoint(driver):
            found["endpoint"] = url
            region = region or "us-east-1"  # what servers other than Amazon's call theirs
        if region:
            found["aws_region"] = region
    return found


def endpoint(driver: str) -> str:
    """The URL of a server other than the cloud's own; ""."""
    names = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]
    if driver == "gcs":
        names = ["TENSORSTORE_GCS_HTTP_URL"]
    urls = (os.environ.get(name, "") for name in names)
    return next(filter(None, urls), "").rstrip("/")


@functools.cache
def context() -> ts.Context:
    """One for every object store: credentials are looked up, and connections kept, once."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    return ts.Context(
        {
            "aws_credentials": {"type": _credentials()},
            "s3_request_retries": RETRIES,
            "gcs_request_retries": RETRIES,
        }
    )


def _credentials() -> str:
    """The kind of AWS credentials that there are. TensorStore's own search of all kinds writes a
    line to stderr for each that is not there, and asks EC2's metadata server, for which everybody
    else waits in vain."""
    metadata = os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        return "environment"
    files = [
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    ]
    roles = ("AWS_CONTAINER_CREDENTIALS_", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_PROFILE")
    named = any(name.startswith(roles) for name in os.environ)
    there = any(Path(file).expanduser().is_file() for file in files)
    return "default" if named or there or metadata.lower() != "true" else "anonymous"


def reason(error: Exception) -> str:
    """What TensorStore says went wrong, without the server's whole answer."""
    words = re.split(r" \[(?:http_|x-amz)", str(error))[0].split()
    return " ".join(words)[:400] or type(error).__name__
