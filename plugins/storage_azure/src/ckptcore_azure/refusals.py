"""Refusals of Azure Blob Storage: errors of this plugin's requests, each with a kind, a reason and a remedy.

The codes come from https://learn.microsoft.com/rest/api/storageservices/blob-service-error-codes
and https://learn.microsoft.com/rest/api/storageservices/common-rest-api-error-codes. Codes of
requests that the plugin does not send, such as codes about leases, tags, page blobs or new
containers, are left out. A refusal without its own text uses the text of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ckptcore_obstore.failures import FailureKind, Refusal

_K = FailureKind
_KEY: Final = "the blob or its scope has a customer-provided encryption key"
_CUSTOMER: Final = "Use blobs without customer-provided encryption keys: this plugin does not support them"
_LEASE: Final = "Break its lease (`az storage blob lease break`), or use another location"
_NETWORK: Final = "Allow it in the firewall of the storage account, or run in an allowed network"
_SIGNATURE: Final = "Create a shared access signature with other settings, or use another credential"

REFUSALS: Final[Mapping[str, Refusal]] = {
    # blobs, containers, blocks
    "BlobNotFound": Refusal(404, _K.MISSING),
    "ResourceNotFound": Refusal(404, _K.MISSING),
    "ContainerNotFound": Refusal(404, _K.NO_BUCKET, "the container does not exist"),
    "ContainerBeingDeleted": Refusal(409, _K.NO_BUCKET, "the container is being deleted"),
    "ContainerDisabled": Refusal(409, _K.NO_BUCKET, "the container is disabled"),
    "InvalidResourceName": Refusal(400, _K.NAME, "the name of the container or blob is invalid", "Use another name"),
    "InvalidUri": Refusal(400, _K.NAME, "", "Use another name"),
    "InvalidInput": Refusal(400, _K.OTHER),
    "BlobAlreadyExists": Refusal(409, _K.CONDITION, "the blob exists"),
    "ConditionNotMet": Refusal(412, _K.CONDITION),
    "TargetConditionNotMet": Refusal(412, _K.CONDITION),
    "InvalidRange": Refusal(416, _K.RANGE),
    "InvalidBlockList": Refusal(400, _K.NO_UPLOAD, "a block of the upload does not exist"),
    "InvalidBlockId": Refusal(400, _K.NO_UPLOAD, "another program uploads to this name"),
    "InvalidBlobOrBlock": Refusal(400, _K.NO_UPLOAD, "the upload is invalid"),
    "InvalidBlobType": Refusal(409, _K.NAME, "the name is that of an append or page blob", "Use another name"),
    "BlockCountExceedsLimit": Refusal(409, _K.SIZE, "too many blocks are uncommitted", "Raise the option 'part_bytes'"),
    "RequestBodyTooLarge": Refusal(413, _K.SIZE, "", "Lower the option 'part_bytes', or save with smaller shards"),
    "CannotVerifyCopySource": Refusal(
        404,
        _K.NO_UPLOAD,
        "the temporary blob of the upload cannot be read",
        "Save again: another save may have aborted the upload. A shared access signature needs the permission r",
    ),
    "PendingCopyOperation": Refusal(409, _K.SERVER, "the blob is being copied"),
    "SnapshotsPresent": Refusal(409, _K.OTHER, "the blob has snapshots", "Delete its snapshots"),
    "DirectoryIsNotEmpty": Refusal(409, _K.OTHER, "a directory of this name exists", "Use another name"),
    "ResourceTypeMismatch": Refusal(409, _K.NAME, "a directory of this name exists", "Use another name"),
    # credentials
    "AuthenticationFailed": Refusal(403, _K.CREDENTIALS),
    "InvalidAuthenticationInfo": Refusal(401, _K.CREDENTIALS),
    "NoAuthenticationInformation": Refusal(401, _K.CREDENTIALS),
    "KeyBasedAuthenticationNotPermitted": Refusal(
        403, _K.CREDENTIALS, "the storage account does not allow its keys", "Sign in with Entra ID: `az login`"
    ),
    # permissions
    "AuthorizationFailure": Refusal(
        403,
        _K.PERMISSION,
        "the credential or the network does not allow it",
        "Give the identity the role Storage Blob Data Contributor, and allow this network in the firewall of the "
        "storage account",
    ),
    "AuthorizationPermissionMismatch": Refusal(403, _K.PERMISSION),
    "InsufficientAccountPermissions": Refusal(403, _K.PERMISSION),
    "AccountIsDisabled": Refusal(403, _K.PERMISSION, "the storage account is disabled", "Enable it, or use another"),
    "PublicAccessNotPermitted": Refusal(
        409, _K.PERMISSION, "the storage account does not allow anonymous requests", "Use a credential"
    ),
    "AuthorizationProtocolMismatch": Refusal(403, _K.PERMISSION, "the signature allows only HTTPS", _SIGNATURE),
    "AuthorizationResourceTypeMismatch": Refusal(
        403, _K.PERMISSION, "the signature is for other kinds of resources", _SIGNATURE
    ),
    "AuthorizationServiceMismatch": Refusal(403, _K.PERMISSION, "the signature is for another service", _SIGNATURE),
    "AuthorizationSourceIPMismatch": Refusal(403, _K.PERMISSION, "this address is not allowed", _NETWORK),
    "UnauthorizedBlobOverwrite": Refusal(
        403, _K.PERMISSION, "the signature does not allow to replace a blob", "Add the permission w to it"
    ),
    "LeaseIdMissing": Refusal(412, _K.PERMISSION, "another program has a lease of the blob", _LEASE),
    "BlobImmutableDueToPolicy": Refusal(409, _K.RETAINED, "a retention policy protects the blob"),
    "BlobImmutableDueToLegalHold": Refusal(409, _K.RETAINED, "a legal hold protects the blob"),
    # archives and encryption
    "BlobArchived": Refusal(409, _K.ARCHIVED, "the blob is in the archive tier"),
    "BlobBeingRehydrated": Refusal(409, _K.ARCHIVED, "the blob is being rehydrated from the archive tier"),
    "BlobUsesCustomerSpecifiedEncryption": Refusal(409, _K.KEY, _KEY, _CUSTOMER),
    "BlobCustomerSpecifiedEncryptionMismatch": Refusal(409, _K.KEY, _KEY, _CUSTOMER),
    # full or busy
    "AccountQuotaExceeded": Refusal(409, _K.FULL),
    "ServerBusy": Refusal(503, _K.THROTTLED),
    "InternalError": Refusal(500, _K.SERVER),
    "OperationTimedOut": Refusal(500, _K.TIMEOUT),
    "AccountBeingCreated": Refusal(409, _K.SERVER, "the storage account is being created"),
    "Md5Mismatch": Refusal(400, _K.CONNECTION, "the request was damaged on its way"),
    "IncompleteBody": Refusal(400, _K.CONNECTION, "the request was damaged on its way"),
    # requests that a service does not accept
    "AccountRequiresHttps": Refusal(400, _K.OTHER, "the service accepts only HTTPS", "Write https:// in the endpoint"),
    "FeatureVersionMismatch": Refusal(409, _K.UNSUPPORTED),
    "NotImplemented": Refusal(501, _K.UNSUPPORTED),
    "UnsupportedHttpVerb": Refusal(405, _K.UNSUPPORTED),
    "UnsupportedHeader": Refusal(400, _K.OTHER),
    "UnsupportedQueryParameter": Refusal(400, _K.UNSUPPORTED),
    "InvalidHeaderValue": Refusal(400, _K.OTHER),
    "InvalidQueryParameterValue": Refusal(400, _K.UNSUPPORTED),
    "InvalidMetadata": Refusal(400, _K.OTHER),
    "MissingRequiredHeader": Refusal(400, _K.OTHER),
    "OutOfRangeInput": Refusal(400, _K.NAME, "", "Use another name"),
}

ANONYMOUS_REFUSALS: Final[Mapping[str, Refusal]] = {
    **REFUSALS,
    "ResourceNotFound": Refusal(
        404, _K.PERMISSION, "the container does not exist, or does not allow anonymous requests", "Use a credential"
    ),
}
"""Refusals of requests without credentials."""
