"""The strict GCS server: no request changes an object if its condition is not met."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest
from ckptcore_gcs_server import StrictGcs

from plugins.storage_gcs.tests.plain_client import Reply, ask, in_two_parts

Write: TypeAlias = Callable[[StrictGcs, str, Mapping[str, str]], Reply]

OBJECTS = "/storage/v1/b/bucket/o"
UPLOADS = "/upload/storage/v1/b/bucket/o"


def _xml_put(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "PUT", f"/bucket/{name}", b"new", **_headers(condition))


def _xml_copy(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "PUT", f"/bucket/{name}", x_goog_copy_source="bucket/source", **_headers(condition))


def _json_media(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "POST", f"{UPLOADS}?uploadType=media&name={name}{_query(condition)}", b"new")


def _json_multipart(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    body, content_type = in_two_parts({"name": name}, b"new")
    return ask(gcs.url, "POST", f"{UPLOADS}?uploadType=multipart{_query(condition)}", body, content_type=content_type)


def _json_resumable(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    begun = ask(gcs.url, "POST", f"{UPLOADS}?uploadType=resumable&name={name}{_query(condition)}")
    return ask(gcs.url, "PUT", begun.headers["location"].removeprefix(gcs.url), b"new")


def _json_compose(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    body = json.dumps({"sourceObjects": [{"name": "source"}]}).encode()
    return ask(gcs.url, "POST", f"{OBJECTS}/{name}/compose?{_query(condition)}", body)


def _json_rewrite(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "POST", f"{OBJECTS}/source/rewriteTo/b/bucket/o/{name}?{_query(condition)}")


def _json_copy(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "POST", f"{OBJECTS}/source/copyTo/b/bucket/o/{name}?{_query(condition)}")


def _xml_delete(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "DELETE", f"/bucket/{name}", **_headers(condition))


def _json_delete(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "DELETE", f"{OBJECTS}/{name}?{_query(condition)}")


def _json_patch(gcs: StrictGcs, name: str, condition: Mapping[str, str]) -> Reply:
    return ask(gcs.url, "PATCH", f"{OBJECTS}/{name}?{_query(condition)}", b'{"metadata": {"a": "b"}}')


def _query(condition: Mapping[str, str]) -> str:
    return "".join(f"&{name}={value}" for name, value in condition.items())


def _headers(condition: Mapping[str, str]) -> dict[str, str]:
    named = {
        "ifGenerationMatch": "x-goog-if-generation-match",
        "ifGenerationNotMatch": "x-goog-if-generation-not-match",
        "ifMetagenerationMatch": "x-goog-if-metageneration-match",
        "ifMetagenerationNotMatch": "x-goog-if-metageneration-not-match",
    }
    return {named[name]: value for name, value in condition.items()}


WRITES: tuple[Write, ...] = (
    _xml_put, _xml_copy, _json_media, _json_multipart, _json_resumable, _json_compose, _json_rewrite, _json_copy,
)  # fmt: skip
CHANGES: tuple[Write, ...] = (*WRITES, _xml_delete, _json_delete, _json_patch)


def _names(write: Write) -> str:
    return write.__name__


@pytest.mark.parametrize("write", CHANGES, ids=_names)
@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("ifGenerationMatch", "1", "{generation}"),
        ("ifGenerationNotMatch", "{generation}", "1"),
        ("ifMetagenerationMatch", "2", "1"),
        ("ifMetagenerationNotMatch", "1", "2"),
    ],
)
def test_a_change_is_made_only_if_its_condition_is_met(
    gcs: StrictGcs, write: Write, name: str, wrong: str, right: str
) -> None:
    ask(gcs.url, "PUT", "/bucket/source", b"new")
    ask(gcs.url, "PUT", "/bucket/there", b"old")
    there = gcs.service.buckets.get("bucket", "there")
    generation = str(there.generation)
    refused = write(gcs, "there", {name: wrong.format(generation=generation)})
    assert refused.status == 412
    assert gcs.service.buckets.get("bucket", "there") is there
    done = write(gcs, "there", {name: right.format(generation=generation)})
    assert done.status in (200, 204)
    assert "there" not in [stored.name for stored in gcs.service.buckets.list("bucket", limit=9).objects] or (
        gcs.service.buckets.get("bucket", "there") is not there
    )


@pytest.mark.parametrize("write", WRITES, ids=_names)
def test_generation_0_means_that_no_object_exists(gcs: StrictGcs, write: Write) -> None:
    ask(gcs.url, "PUT", "/bucket/source", b"new")
    assert write(gcs, "name", {"ifGenerationMatch": "1"}).status == 412
    assert write(gcs, "name", {"ifGenerationNotMatch": "0"}).status == 412
    assert write(gcs, "name", {"ifGenerationMatch": "0"}).status == 200
    first = gcs.service.buckets.get("bucket", "name")
    assert first.data == b"new"
    assert write(gcs, "name", {"ifGenerationMatch": "0"}).status == 412
    assert gcs.service.buckets.get("bucket", "name") is first


def test_the_condition_of_a_resumable_upload_is_checked_at_its_end(gcs: StrictGcs) -> None:
    begun = ask(gcs.url, "POST", f"{UPLOADS}?uploadType=resumable&name=late&ifGenerationMatch=0")
    ask(gcs.url, "PUT", "/bucket/late", b"meanwhile")
    assert ask(gcs.url, "PUT", begun.headers["location"].removeprefix(gcs.url), b"new").status == 412
    assert gcs.service.buckets.get("bucket", "late").data == b"meanwhile"


@pytest.mark.parametrize(
    "header", ["x-goog-if-generation-match", "x-goog-if-metageneration-match", "if-match", "if-none-match"]
)
def test_an_upload_in_parts_refuses_conditions(gcs: StrictGcs, header: str) -> None:
    # https://cloud.google.com/storage/docs/request-preconditions: "Preconditions cannot be used in
    # XML API multipart uploads. Attempting to do so results in a 400 NotImplemented error."
    for target in ("/bucket/a?uploads", "/bucket/a?uploadId=1"):
        refused = ask(gcs.url, "POST", target, **{header: "0"})
        assert refused.status == 400
        assert b"<Code>NotImplemented</Code>" in refused.body


@pytest.mark.parametrize("write", [_xml_put, _json_media, _xml_delete, _json_delete], ids=_names)
@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_changes_refuse_conditions_by_entity_tag(gcs: StrictGcs, write: Write, header: str) -> None:
    ask(gcs.url, "PUT", "/bucket/there", b"old")
    methods = {_xml_put: "PUT", _json_media: "POST", _xml_delete: "DELETE", _json_delete: "DELETE"}
    target = {
        _xml_put: "/bucket/there",
        _json_media: f"{UPLOADS}?uploadType=media&name=there",
        _xml_delete: "/bucket/there",
        _json_delete: f"{OBJECTS}/there",
    }[write]
    assert ask(gcs.url, methods[write], target, b"new", **{header: "*"}).status == 400
    assert gcs.service.buckets.get("bucket", "there").data == b"old"


def test_conditions_of_reads_are_checked(gcs: StrictGcs) -> None:
    ask(gcs.url, "PUT", "/bucket/there", b"old")
    there = gcs.service.buckets.get("bucket", "there")
    generation = str(there.generation)
    quoted = f'"{there.etag}"'
    for target in (f"{OBJECTS}/there?alt=media", f"{OBJECTS}/there?alt=json"):
        assert ask(gcs.url, "GET", f"{target}&ifGenerationMatch={generation}").status == 200
        assert ask(gcs.url, "GET", f"{target}&ifGenerationMatch=1").status == 412
        assert ask(gcs.url, "GET", f"{target}&ifGenerationNotMatch={generation}").status == 304
        assert ask(gcs.url, "GET", f"{target}&generation=1").status == 404
    for method in ("GET", "HEAD"):
        assert ask(gcs.url, method, "/bucket/there", x_goog_if_generation_match="1").status == 412
        assert ask(gcs.url, method, "/bucket/there", if_match=quoted).status == 200
        assert ask(gcs.url, method, "/bucket/there", if_match='"other"').status == 412
        assert ask(gcs.url, method, "/bucket/there", if_none_match=quoted).status == 304
        assert ask(gcs.url, method, "/bucket/there?generation=1").status == 404


def test_the_source_of_a_copy_has_its_own_conditions(gcs: StrictGcs) -> None:
    ask(gcs.url, "PUT", "/bucket/source", b"new")
    rewrite = f"{OBJECTS}/source/rewriteTo/b/bucket/o/copy?ifGenerationMatch=0"
    assert ask(gcs.url, "POST", f"{rewrite}&ifSourceGenerationMatch=1").status == 412
    composed = {"sourceObjects": [{"name": "source", "objectPreconditions": {"ifGenerationMatch": "1"}}]}
    assert ask(gcs.url, "POST", f"{OBJECTS}/copy/compose", json.dumps(composed).encode()).status == 412
    copied = ask(
        gcs.url, "PUT", "/bucket/copy", x_goog_copy_source="bucket/source",
        x_goog_copy_source_if_generation_match="1",
    )  # fmt: skip
    assert copied.status == 412
    assert ask(gcs.url, "GET", "/bucket/copy").status == 404


def test_errors_have_the_form_of_each_api(gcs: StrictGcs) -> None:
    body = ask(gcs.url, "GET", f"{OBJECTS}/none").json()
    assert body["error"]["code"] == 404
    assert body["error"]["errors"][0]["reason"] == "notFound"
    assert b"<Code>NoSuchKey</Code>" in ask(gcs.url, "GET", "/bucket/none").body
    assert b"<Code>NoSuchBucket</Code>" in ask(gcs.url, "GET", "/other/none").body
    assert ask(gcs.url, "GET", f"{OBJECTS}/none?alt=media").body == b"No such object: bucket/none"
    ask(gcs.url, "PUT", "/bucket/there", b"old")
    refused = ask(gcs.url, "POST", f"{UPLOADS}?uploadType=media&name=there&ifGenerationMatch=0", b"new").json()
    assert refused["error"]["errors"][0]["reason"] == "conditionNotMet"
    assert b"<Code>PreconditionFailed</Code>" in _xml_put(gcs, "there", {"ifGenerationMatch": "0"}).body


def test_unknown_requests_are_refused(gcs: StrictGcs) -> None:
    """If the server ignored an unknown request, a test could miss a defect."""
    for method, target in (("POST", "/storage/v1/b/bucket/lockRetentionPolicy"), ("GET", "/bucket/a?acl")):
        assert ask(gcs.url, method, target).status == 501
