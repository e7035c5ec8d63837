"""Refusals of S3: the errors of the calls that this plugin makes, with what refused and what to do.

The codes are those of https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and of compatible services
(MinIO, Ceph). Codes of calls that the plugin does not make, such as those about ACLs, tags or new buckets, are left
out. A refusal without an own text has that of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.failures import FailureKind, Refusal

__all__ = ["REFUSALS"]

_K = FailureKind
_ENDPOINT: Final = "Check the endpoint and the option 'addressing_style'"
_KEY: Final = "the KMS key of the bucket or of the option 'sse_kms_key_id' cannot be used"
_SUPPORT: Final = "Ask AWS Support, or use another account"
_UPLOAD: Final = "Save again: another save or a lifecycle rule may have aborted the upload"
_BROKEN: Final = "the request arrived broken"

REFUSALS: Final[Mapping[str, Refusal]] = {
    # objects, buckets, uploads
    "NoSuchKey": Refusal(404, _K.MISSING),
    "NoSuchVersion": Refusal(404, _K.MISSING),
    "NoSuchBucket": Refusal(404, _K.NO_BUCKET),
    "InvalidBucketName": Refusal(400, _K.NO_BUCKET, "the service takes no bucket of this name"),
    "NoSuchUpload": Refusal(404, _K.NO_UPLOAD, "", _UPLOAD),
    "InvalidPart": Refusal(400, _K.NO_UPLOAD, "a part of the upload does not exist", _UPLOAD),
    "InvalidPartOrder": Refusal(400, _K.OTHER, "the parts of the upload are not in order"),
    "PreconditionFailed": Refusal(412, _K.CONDITION),
    "InvalidRange": Refusal(416, _K.RANGE),
    "InvalidObjectState": Refusal(
        403,
        _K.ARCHIVED,
        "",
        "Restore it (`aws s3api restore-object`) and wait until that is done, or load another checkpoint; exclude "
        "checkpoints from lifecycle rules that archive objects",
    ),
    "InvalidBucketState": Refusal(409, _K.OTHER, "the state of the bucket does not allow it", "Check the bucket"),
    "EntityTooLarge": Refusal(400, _K.SIZE, "", "Save with smaller shards, or with a layout that makes smaller files"),
    "EntityTooSmall": Refusal(
        400, _K.SIZE, "a part is smaller than the service allows", "Raise the option 'part_bytes'"
    ),
    "KeyTooLongError": Refusal(400, _K.NAME, "the name is too long", "Use a shorter location or shorter names"),
    "InvalidURI": Refusal(400, _K.NAME, "", "Use another name"),
    # credentials
    "InvalidAccessKeyId": Refusal(403, _K.CREDENTIALS),
    "SignatureDoesNotMatch": Refusal(403, _K.CREDENTIALS),
    "ExpiredToken": Refusal(400, _K.CREDENTIALS, "the credentials have expired"),
    "InvalidToken": Refusal(400, _K.CREDENTIALS),
    "TokenRefreshRequired": Refusal(400, _K.CREDENTIALS, "the credentials have expired"),
    "InvalidSecurity": Refusal(403, _K.CREDENTIALS),
    "MissingSecurityHeader": Refusal(400, _K.CREDENTIALS),
    "MissingAuthenticationToken": Refusal(403, _K.CREDENTIALS),
    "CredentialsNotSupported": Refusal(400, _K.CREDENTIALS, "the service takes no credentials for this request"),
    "RequestTimeTooSkewed": Refusal(403, _K.CLOCK),
    "RequestExpired": Refusal(403, _K.CLOCK),
    # permissions
    "AccessDenied": Refusal(403, _K.PERMISSION),
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
    "TooManyRequests": Refusal(429, _K.THROTTLED),
    "BandwidthLimitExceeded": Refusal(503, _K.THROTTLED),
    "ServiceUnavailable": Refusal(503, _K.THROTTLED),
    "Busy": Refusal(503, _K.THROTTLED),
    "InternalError": Refusal(500, _K.SERVER),
    "OperationAborted": Refusal(409, _K.SERVER, "the service carries out a conflicting operation"),
    "ConditionalRequestConflict": Refusal(409, _K.SERVER, "the service carries out a conflicting request"),
    "RequestTimeout": Refusal(400, _K.TIMEOUT),  # the service did not receive the body in time
    "IncompleteBody": Refusal(400, _K.CONNECTION, _BROKEN),
    "BadDigest": Refusal(400, _K.CONNECTION, _BROKEN),
    "ConnectionClosedByRequester": Refusal(400, _K.CONNECTION, _BROKEN),
    "ResponseInterrupted": Refusal(400, _K.CONNECTION, _BROKEN),
    # requests that a service does not take
    "MissingContentMD5": Refusal(400, _K.DIGEST),  # MinIO
    "NotImplemented": Refusal(501, _K.UNSUPPORTED),
    "MethodNotAllowed": Refusal(405, _K.UNSUPPORTED),
    "UnsupportedArgument": Refusal(400, _K.UNSUPPORTED),
    "UnsupportedSignature": Refusal(400, _K.UNSUPPORTED),
    "XAmzContentSHA256Mismatch": Refusal(400, _K.UNSUPPORTED, "the service takes no bodies without a signature"),
    "InvalidDigest": Refusal(400, _K.OTHER, "the service takes no MD5 digests"),
    "InvalidArgument": Refusal(400, _K.OTHER),
    "InvalidRequest": Refusal(400, _K.OTHER),
    "BadRequest": Refusal(400, _K.OTHER),
    "InvalidStorageClass": Refusal(400, _K.OTHER),
    "MalformedXML": Refusal(400, _K.OTHER),
    "MaxMessageLengthExceeded": Refusal(400, _K.OTHER),
    "MetadataTooLarge": Refusal(400, _K.OTHER),
    "MissingContentLength": Refusal(411, _K.OTHER),
    "MissingRequestBodyError": Refusal(400, _K.OTHER),
    "RequestHeaderSectionTooLarge": Refusal(400, _K.OTHER),
    "UnexpectedContent": Refusal(400, _K.OTHER),
}
"""By code. ``KMS.*`` is for all other codes that begin so."""
