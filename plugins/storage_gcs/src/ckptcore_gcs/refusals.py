"""Refusals of Google Cloud Storage: errors of this plugin's requests, each with a kind, a reason and a remedy.

The codes come from https://cloud.google.com/storage/docs/xml-api/reference-status, and the reasons
from https://cloud.google.com/storage/docs/json_api/v1/status-codes, where they begin with a small
letter. Errors of requests that the plugin does not send, such as errors about ACLs or new buckets,
are left out. A refusal without its own text uses the text of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.failures import SHARED_REFUSALS, FailureKind, Refusal

_K = FailureKind
_BILLING: Final = "Check the billing of the project, or set the option 'user_project' to another"
_PROJECT: Final = "Set the option 'user_project' to a project that exists and pays"
_KMS: Final = "Check the Cloud KMS key of the bucket, and that the service agent of Cloud Storage may use it"
_CUSTOMER: Final = "Use objects without customer-supplied encryption keys: this plugin does not support them"
_RETAINED: Final = "Wait until it ends, or use a bucket without retention and holds for checkpoints"

REFUSALS: Final[Mapping[str, Refusal]] = {
    **SHARED_REFUSALS,
    # objects, buckets, uploads
    "NotFound": Refusal(404, _K.MISSING),
    "Gone": Refusal(410, _K.MISSING),
    "ConditionNotMet": Refusal(412, _K.CONDITION),
    "RequestedRangeNotSatisfiable": Refusal(416, _K.RANGE),
    "UploadTooLarge": SHARED_REFUSALS["EntityTooLarge"]._replace(status=413),
    "KeyTooLong": Refusal(400, _K.NAME, "the name is too long", "Use a shorter location or shorter names"),
    # credentials
    "AuthenticationRequired": Refusal(401, _K.CREDENTIALS),
    "AuthError": Refusal(401, _K.CREDENTIALS),
    "Required": Refusal(401, _K.CREDENTIALS),
    # permissions
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
    "SslRequired": Refusal(403, _K.OTHER, "the service accepts only HTTPS", "Write https:// in the endpoint"),
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
        400, _K.KEY, "the object has a customer-supplied encryption key", _CUSTOMER
    ),
    "ResourceNotEncryptedWithCustomerEncryptionKey": Refusal(400, _K.KEY, "", _CUSTOMER),
    # full or busy
    "InsufficientQuota": Refusal(507, _K.FULL),
    "QuotaExceeded": Refusal(507, _K.FULL),
    "quotaExceeded": Refusal(403, _K.THROTTLED),  # the JSON API reports too many requests with this reason
    "SlowDown": Refusal(429, _K.THROTTLED),
    "RateLimitExceeded": Refusal(429, _K.THROTTLED),
    "UserRateLimitExceeded": Refusal(403, _K.THROTTLED),
    "UsageLimitsRateLimitExceeded": Refusal(429, _K.THROTTLED),
    "BackendError": Refusal(500, _K.SERVER),
    "GatewayTimeout": Refusal(504, _K.SERVER),
    "Conflict": Refusal(409, _K.SERVER, "a conflicting operation is running"),
    "UploadBrokenConnection": Refusal(408, _K.TIMEOUT),
    "CrcMismatch": SHARED_REFUSALS["BadDigest"],
    # requests that a service does not accept
    "TurnedDown": Refusal(400, _K.UNSUPPORTED),
    "PermanentRedirect": Refusal(301, _K.REGION, "the bucket has another endpoint"),
    "TemporaryRedirect": Refusal(307, _K.REGION, "the bucket has another endpoint"),
    "Redirect": Refusal(307, _K.REGION, "the bucket has another endpoint"),
    "ExcessHeaderValues": Refusal(400, _K.OTHER),
    "Invalid": Refusal(400, _K.OTHER),
    "InvalidParameter": Refusal(400, _K.OTHER),
    "InvalidDigest": Refusal(400, _K.OTHER),
    "MalformedHeaderValue": Refusal(400, _K.OTHER),
    "ParseError": Refusal(400, _K.OTHER),
    "WrongUrlForUpload": Refusal(400, _K.OTHER),
}
"""Refusals by code of the XML API, or by reason of the JSON API with a capital first letter.

The reason ``quotaExceeded`` has its own key, as it does not mean the same as the code.
"""
