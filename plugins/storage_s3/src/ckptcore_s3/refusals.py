"""Refusals of S3: errors of the requests that this plugin sends, each with a kind, a reason and a remedy.

The codes come from https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html and from
compatible services (MinIO, Ceph). Codes of requests that the plugin does not send, such as codes
about ACLs, tags or new buckets, are left out. A refusal without its own text uses the text of its
kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.failures import SHARED_REFUSALS, FailureKind, Refusal

_K = FailureKind
_ENDPOINT: Final = "Check the endpoint and the option 'addressing_style'"
_KEY: Final = "the KMS key of the bucket or of the option 'sse_kms_key_id' cannot be used"
_SUPPORT: Final = "Ask AWS Support, or use another account"

REFUSALS: Final[Mapping[str, Refusal]] = {
    **SHARED_REFUSALS,
    # objects, buckets, uploads
    "NoSuchVersion": Refusal(404, _K.MISSING),
    "InvalidObjectState": Refusal(
        403,
        _K.ARCHIVED,
        "",
        "Restore it (`aws s3api restore-object`) and wait until that is done, or load another checkpoint; exclude "
        "checkpoints from lifecycle rules that archive objects",
    ),
    "KeyTooLongError": Refusal(400, _K.NAME, "the name is too long", "Use a shorter location or shorter names"),
    # credentials
    "InvalidAccessKeyId": Refusal(403, _K.CREDENTIALS),
    "TokenRefreshRequired": Refusal(400, _K.CREDENTIALS, "the credentials have expired"),
    "MissingAuthenticationToken": Refusal(403, _K.CREDENTIALS),
    "RequestExpired": Refusal(403, _K.CLOCK),
    # permissions
    "AllAccessDisabled": Refusal(403, _K.PERMISSION, "all access to the bucket or object is disabled", _SUPPORT),
    "AccountProblem": Refusal(403, _K.PERMISSION, "the account of AWS has a problem", _SUPPORT),
    "NotSignedUp": Refusal(403, _K.PERMISSION, "the account of AWS is not signed up for S3", "Sign up, or use another"),
    "InvalidPayer": Refusal(403, _K.PERMISSION, "the payer of the request is not accepted", _SUPPORT),
    "UnauthorizedAccess": Refusal(403, _K.PERMISSION),
    "ObjectLocked": Refusal(
        403, _K.RETAINED, "", "Wait until the retention ends, or use a bucket without Object Lock for checkpoints"
    ),
    # encryption
    "KMS.*": Refusal(
        400, _K.KEY, _KEY, "Check the key in KMS, and that the role may use it (kms:GenerateDataKey, kms:Decrypt)"
    ),
    "KMS.DisabledException": Refusal(400, _K.KEY, "the KMS key is disabled", "Enable it, or name another key"),
    "KMS.KMSInvalidStateException": Refusal(
        400, _K.KEY, "the KMS key is being deleted, or is not ready", "Cancel its deletion, or name another key"
    ),
    "KMS.NotFoundException": Refusal(
        400, _K.KEY, "the KMS key does not exist in the region of the bucket", "Check the option 'sse_kms_key_id'"
    ),
    "KMS.InvalidKeyUsageException": Refusal(
        400, _K.KEY, "the KMS key is not for encryption", "Name a symmetric key in the option 'sse_kms_key_id'"
    ),
    "KMS.ThrottlingException": Refusal(400, _K.THROTTLED, "KMS throttles the requests for the key"),
    "InvalidEncryptionAlgorithmError": Refusal(400, _K.OTHER, "the encryption is unknown", "Check the option 'sse'"),
    # regions and endpoints
    "AuthorizationHeaderMalformed": Refusal(400, _K.REGION),
    "PermanentRedirect": Refusal(301, _K.REGION),
    "TemporaryRedirect": Refusal(307, _K.REGION),
    "Redirect": Refusal(307, _K.REGION),
    "IllegalLocationConstraintException": Refusal(400, _K.REGION),
    "IncorrectEndpoint": Refusal(400, _K.REGION),
    "EndpointNotFound": Refusal(400, _K.REGION),
    "InvalidRegion": Refusal(403, _K.REGION),
    "InvalidAddressingHeader": Refusal(400, _K.OTHER, "the address of the bucket is invalid", _ENDPOINT),
    "InvalidHostHeader": Refusal(400, _K.OTHER, "the host in the address of the bucket is invalid", _ENDPOINT),
    # full or busy
    "QuotaExceeded": Refusal(403, _K.FULL),
    "InsufficientQuota": Refusal(403, _K.FULL),
    "XMinioStorageFull": Refusal(507, _K.FULL),
    "XMinioAdminBucketQuotaExceeded": Refusal(400, _K.FULL),
    "SlowDown": Refusal(503, _K.THROTTLED),
    "Throttling": Refusal(400, _K.THROTTLED),
    "ThrottlingException": Refusal(400, _K.THROTTLED),
    "RequestLimitExceeded": Refusal(503, _K.THROTTLED),
    "BandwidthLimitExceeded": Refusal(503, _K.THROTTLED),
    "Busy": Refusal(503, _K.THROTTLED),
    "ConditionalRequestConflict": Refusal(409, _K.SERVER, "a conflicting request is running"),
    "ConnectionClosedByRequester": SHARED_REFUSALS["BadDigest"],
    "ResponseInterrupted": SHARED_REFUSALS["BadDigest"],
    # requests that a service does not accept
    "MissingContentMD5": Refusal(400, _K.DIGEST),  # MinIO
    "UnsupportedArgument": Refusal(400, _K.UNSUPPORTED),
    "UnsupportedSignature": Refusal(400, _K.UNSUPPORTED),
    "XAmzContentSHA256Mismatch": Refusal(400, _K.UNSUPPORTED, "the service requires signed bodies"),
    "InvalidDigest": Refusal(400, _K.OTHER, "the service accepts no MD5 digests"),
    "InvalidRequest": Refusal(400, _K.OTHER),
    "InvalidStorageClass": Refusal(400, _K.OTHER),
    "RequestHeaderSectionTooLarge": Refusal(400, _K.OTHER),
}
"""The refusals of S3, by code. See `ckptcore_obstore.failures.Refusals`."""
