"""Refusals of Google Cloud Storage: the errors of the calls that this plugin makes, with what refused and what to do.

The codes are those of https://cloud.google.com/storage/docs/xml-api/reference-status, and the reasons those of
https://cloud.google.com/storage/docs/json_api/v1/status-codes, which begin with a small letter there. Those of calls
that the plugin does not make, such as those about ACLs or new buckets, are left out. A refusal without an own text has
that of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.failures import FailureKind, Refusal

__all__ = ["REFUSALS"]

_K = FailureKind
_BILLING: Final = "Check the billing of the project, or set the option 'user_project' to another"
_PROJECT: Final = "Set the option 'user_project' to a project that exists and pays"
_KMS: Final = "Check the Cloud KMS key of the bucket, and that the service agent of Cloud Storage may use it"
_CUSTOMER: Final = "Use a bucket or objects without keys that customers supply: this plugin has no option for them"
_RETAINED: Final = "Wait until it ends, or use a bucket without retention and holds for checkpoints"
_BROKEN: Final = "the request arrived broken"
_UPLOAD: Final = "Save again: another save or a lifecycle rule may have aborted the upload"

REFUSALS: Final[Mapping[str, Refusal]] = {
    # objects, buckets, uploads
    "NoSuchKey": Refusal(404, _K.MISSING),
    "NotFound": Refusal(404, _K.MISSING),
    "Gone": Refusal(410, _K.MISSING),
    "NoSuchBucket": Refusal(404, _K.NO_BUCKET),
    "InvalidBucketName": Refusal(400, _K.NO_BUCKET, "the service does not allow buckets with this name"),
    "NoSuchUpload": Refusal(404, _K.NO_UPLOAD, "", _UPLOAD),
    "InvalidPart": Refusal(400, _K.NO_UPLOAD, "a part of the upload does not exist", _UPLOAD),
    "InvalidPartOrder": Refusal(400, _K.OTHER, "the parts of the upload are not in order"),
    "PreconditionFailed": Refusal(412, _K.CONDITION),
    "ConditionNotMet": Refusal(412, _K.CONDITION),
    "InvalidRange": Refusal(416, _K.RANGE),
    "RequestedRangeNotSatisfiable": Refusal(416, _K.RANGE),
    "InvalidBucketState": Refusal(409, _K.OTHER, "the state of the bucket does not allow it", "Check the bucket"),
    "EntityTooLarge": Refusal(400, _K.SIZE, "", "Save with smaller shards, or with a layout that makes smaller files"),
    "UploadTooLarge": Refusal(413, _K.SIZE, "", "Save with smaller shards, or with a layout that makes smaller files"),
    "EntityTooSmall": Refusal(
        400, _K.SIZE, "a part is smaller than the service allows", "Raise the option 'part_bytes'"
    ),
    "KeyTooLong": Refusal(400, _K.NAME, "the name is too long", "Use a shorter location or shorter names"),
    "InvalidURI": Refusal(400, _K.NAME, "", "Use another name"),
    # credentials
    "AuthenticationRequired": Refusal(401, _K.CREDENTIALS),
    "AuthError": Refusal(401, _K.CREDENTIALS),
    "Required": Refusal(401, _K.CREDENTIALS),
    "ExpiredToken": Refusal(400, _K.CREDENTIALS, "the credentials have expired"),
    "InvalidToken": Refusal(400, _K.CREDENTIALS),
    "InvalidSecurity": Refusal(403, _K.CREDENTIALS),
    "MissingSecurityHeader": Refusal(400, _K.CREDENTIALS),
    "SignatureDoesNotMatch": Refusal(403, _K.CREDENTIALS),
    "CredentialsNotSupported": Refusal(400, _K.CREDENTIALS, "the service takes no credentials for this request"),
    "RequestTimeTooSkewed": Refusal(403, _K.CLOCK),
    # permissions
    "AccessDenied": Refusal(403, _K.PERMISSION),
    "Forbidden": Refusal(403, _K.PERMISSION),
    "InsufficientPermissions": Refusal(
        403,
        _K.PERMISSION,
        "the access scopes of the token do not allow it",
        "Give the machine or the token the scope devstorage.read_write or cloud-platform",
    ),
    "AccountDisabled": Refusal(403, _K.PERMISSION, "the account is disabled", "Enable it, or use another account"),
    "AccountProblem": Refusal(403, _K.PERMISSION, "the account has a problem", _BILLING),
    "NotSignedUp": Refusal(403, _K.PERMISSION, "the account is not signed up for Cloud Storage", _BILLING),
    "InvalidPayer": Refusal(403, _K.PERMISSION, "the payer of the request is not accepted", _BILLING),
    "CountryBlocked": Refusal(403, _K.PERMISSION, "the service is not available in this country", "Run elsewhere"),
    "SslRequired": Refusal(403, _K.OTHER, "the service takes only HTTPS", "Write https:// in the endpoint"),
    "OrgPolicyConstraintFailed": Refusal(
        412,
        _K.PERMISSION,
        "a policy of the organisation does not allow it",
        "Ask the administrator of the organisation",
    ),
    "UsageLimitsAccessNotConfigured": Refusal(
        403,
        _K.PERMISSION,
        "the API of Cloud Storage is not enabled in the project",
        "Enable it, or use another project",
    ),
    "AccessNotConfigured": Refusal(
        403,
        _K.PERMISSION,
        "the API of Cloud Storage is not enabled in the project",
        "Enable it, or use another project",
    ),
    "RetentionPolicyNotMet": Refusal(403, _K.RETAINED, "", _RETAINED),
    "ObjectUnderActiveHold": Refusal(403, _K.RETAINED, "the object has a hold", _RETAINED),
    # the project that pays
    "UserProjectMissing": Refusal(
        400, _K.OTHER, "", "Set the option 'user_project' to the project that pays: the bucket's owner does not"
    ),
    "AuthenticationRequiredRequesterPays": Refusal(
        401,
        _K.CREDENTIALS,
        "the bucket's owner does not pay for anonymous requests",
        "Use credentials, and " + _PROJECT,
    ),
    "UserProjectInvalid": Refusal(400, _K.OTHER, "the project that pays is invalid", _PROJECT),
    "UserProjectInconsistent": Refusal(400, _K.OTHER, "the request names two projects that pay", _PROJECT),
    "UserProjectAccessDenied": Refusal(
        403,
        _K.PERMISSION,
        "the account may not let the project pay",
        "Give the account serviceusage.services.use on the project of 'user_project' or GOOGLE_CLOUD_QUOTA_PROJECT",
    ),
    "UserProjectAccountProblem": Refusal(403, _K.PERMISSION, "the project that pays has a problem", _BILLING),
    # encryption
    "CloudKmsBadKey": Refusal(400, _K.KEY, "", _KMS),
    "CloudKmsDisabledKey": Refusal(400, _K.KEY, "the Cloud KMS key is disabled or destroyed", _KMS),
    "CloudKmsDecryptionKeyNotFound": Refusal(400, _K.KEY, "the Cloud KMS key of the object does not exist", _KMS),
    "CloudKmsEncryptionKeyNotFound": Refusal(400, _K.KEY, "the Cloud KMS key of the bucket does not exist", _KMS),
    "CloudKmsCannotChangeKeyName": Refusal(400, _K.KEY, "", _KMS),
    "CloudKmsKeyLocationNotAllowed": Refusal(400, _K.KEY, "the Cloud KMS key is in another location", _KMS),
    "CustomerEncryptionAlgorithmIsInvalid": Refusal(400, _K.KEY, "", _CUSTOMER),
    "CustomerEncryptionKeyFormatIsInvalid": Refusal(400, _K.KEY, "", _CUSTOMER),
    "CustomerEncryptionKeyIsIncorrect": Refusal(400, _K.KEY, "", _CUSTOMER),
    "CustomerEncryptionKeySha256IsInvalid": Refusal(400, _K.KEY, "", _CUSTOMER),
    "ResourceIsEncryptedWithCustomerEncryptionKey": Refusal(
        400, _K.KEY, "the object has a key of a customer", _CUSTOMER
    ),
    "ResourceNotEncryptedWithCustomerEncryptionKey": Refusal(400, _K.KEY, "", _CUSTOMER),
    # full or busy
    "InsufficientQuota": Refusal(507, _K.FULL),
    "QuotaExceeded": Refusal(507, _K.FULL),
    "quotaExceeded": Refusal(403, _K.THROTTLED),  # the reason is about the rate of requests
    "SlowDown": Refusal(429, _K.THROTTLED),
    "TooManyRequests": Refusal(429, _K.THROTTLED),
    "RateLimitExceeded": Refusal(429, _K.THROTTLED),
    "UserRateLimitExceeded": Refusal(403, _K.THROTTLED),
    "UsageLimitsRateLimitExceeded": Refusal(429, _K.THROTTLED),
    "ServiceUnavailable": Refusal(503, _K.THROTTLED),
    "InternalError": Refusal(500, _K.SERVER),
    "BackendError": Refusal(500, _K.SERVER),
    "GatewayTimeout": Refusal(504, _K.SERVER),
    "Conflict": Refusal(409, _K.SERVER, "the service carries out a conflicting operation"),
    "OperationAborted": Refusal(409, _K.SERVER, "the service carries out a conflicting operation"),
    "RequestTimeout": Refusal(400, _K.TIMEOUT),
    "UploadBrokenConnection": Refusal(408, _K.TIMEOUT),
    "IncompleteBody": Refusal(400, _K.CONNECTION, _BROKEN),
    "BadDigest": Refusal(400, _K.CONNECTION, _BROKEN),
    "CrcMismatch": Refusal(400, _K.CONNECTION, _BROKEN),
    # requests that a service does not take
    "NotImplemented": Refusal(501, _K.UNSUPPORTED),
    "MethodNotAllowed": Refusal(405, _K.UNSUPPORTED),
    "TurnedDown": Refusal(400, _K.UNSUPPORTED),
    "PermanentRedirect": Refusal(301, _K.REGION, "the bucket has another endpoint"),
    "TemporaryRedirect": Refusal(307, _K.REGION, "the bucket has another endpoint"),
    "Redirect": Refusal(307, _K.REGION, "the bucket has another endpoint"),
    "ExcessHeaderValues": Refusal(400, _K.OTHER),
    "Invalid": Refusal(400, _K.OTHER),
    "BadRequest": Refusal(400, _K.OTHER),
    "InvalidArgument": Refusal(400, _K.OTHER),
    "InvalidParameter": Refusal(400, _K.OTHER),
    "InvalidDigest": Refusal(400, _K.OTHER),
    "MalformedHeaderValue": Refusal(400, _K.OTHER),
    "MalformedXML": Refusal(400, _K.OTHER),
    "ParseError": Refusal(400, _K.OTHER),
    "MaxMessageLengthExceeded": Refusal(400, _K.OTHER),
    "MetadataTooLarge": Refusal(400, _K.OTHER),
    "MissingContentLength": Refusal(411, _K.OTHER),
    "MissingRequestBodyError": Refusal(400, _K.OTHER),
    "WrongUrlForUpload": Refusal(400, _K.OTHER),
    "UnexpectedContent": Refusal(400, _K.OTHER),
}
"""By code, or by reason with a capital letter."""
