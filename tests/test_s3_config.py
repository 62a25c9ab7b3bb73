"""The files of the bucket: a real server takes them, a policy allows what its code asks for."""

import fnmatch
import json
import re
from pathlib import Path

import pytest
import yaml

from tasks.artifacts.fanout import Network, fan_outs
from tasks.artifacts.retention import Keep, carry_out, hold, plan_retention, release
from tasks.artifacts.store import PolicyStore, open_store
from tasks.embedded.seaweed import memory_limit

CLUSTER = Path(__file__).resolve().parent.parent / "configs/cluster"
REQUESTS = {
    "HeadObject": "s3:GetObject", "GetObject": "s3:GetObject", "PutObject": "s3:PutObject",
    "ListObjectsV2": "s3:ListBucket", "DeleteObject": "s3:DeleteObject",
    "GetBucketVersioning": "s3:GetBucketVersioning", "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject", "CompleteMultipartUpload": "s3:PutObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
}  # fmt: skip


def load(name: str) -> dict:
    return json.loads((CLUSTER / name).read_text())


def actions_of(store: PolicyStore) -> set[tuple[str, str]]:
    """Collects (action, resource) of every request that the store's client makes from now on."""
    made: set[tuple[str, str]] = set()

    def note(params: dict, model, **_) -> None:
        action = REQUESTS[model.name]
        with_version = "versionId=" in params["url_path"] or "versionId" in params["query_string"]
        if with_version and action in ("s3:GetObject", "s3:DeleteObject"):
            action += "Version"
        key = params["url_path"].split("?")[0].removeprefix(f"/{store.bucket.name}").lstrip("/")
        made.add((action, f"arn:aws:s3:::BUCKET/PREFIX/{key}" if key else "arn:aws:s3:::BUCKET"))

    store.bucket._client.meta.events.register("before-call.s3", note)
    return made


def is_allowed(policy: dict, action: str, resource: str) -> bool:
    for statement in policy["Statement"]:
        names = [statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"]
        places = [statement["Resource"]] if isinstance(statement["Resource"], str) else statement["Resource"]
        if action in names and any(fnmatch.fnmatchcase(resource, place) for place in places):
            return statement["Effect"] == "Allow"
    return False


@pytest.fixture
def published(policy_store, tmp_path) -> PolicyStore:
    from test_retention import publish_chain

    publish_chain(policy_store, tmp_path, 3)
    return policy_store


def test_the_trainers_policy_allows_every_request_of_a_publication(policy_store, tmp_path):
    from test_retention import publish_chain

    made = actions_of(policy_store)
    publish_chain(policy_store, tmp_path, 3)
    (tmp_path / "large").write_bytes(bytes(17 << 20))
    policy_store.put_file(tmp_path / "large")
    policy_store.head(), policy_store.history(), policy_store.pull(1)
    policy_store.bucket.require_versioning()
    denied = {request for request in made if not is_allowed(load("s3-policy-trainer.json"), *request)}
    assert len(made) > 10 and not denied


def test_the_rollout_policy_allows_reading_and_no_writing_of_versions(published, store_folder, tmp_path):
    reader = open_store(str(store_folder), published.campaign, cache=tmp_path / "reader")
    made = actions_of(reader)
    reader.pull(reader.reference(2))
    reader.put_object("evaluations/000009-c.json", b"{}")
    hold(reader, 2, "worker", hours=1)
    policy = load("s3-policy-rollout.json")
    assert made and not {request for request in made if not is_allowed(policy, *request)}
    for action, key in (
        ("s3:PutObject", "blobs/sha256/ab/x"), ("s3:PutObject", "versions/000000000001/manifest.json"),
        ("s3:DeleteObject", "blobs/sha256/ab/x"), ("s3:DeleteObjectVersion", "blobs/sha256/ab/x"),
    ):  # fmt: skip
        assert not is_allowed(policy, action, f"arn:aws:s3:::BUCKET/PREFIX/campaign/{key}")


def test_the_retention_policy_allows_what_retention_does_and_no_manifest_goes(published):
    made = actions_of(published)
    hold(published, 0, "me", hours=None)
    plan = plan_retention(published, Keep(last=1, best=0, min_age_hours=0))
    carry_out(published, plan)
    release(published, 0, "me")
    policy = load("s3-policy-retention.json")
    assert made and not {request for request in made if not is_allowed(policy, *request)}
    manifest = "arn:aws:s3:::BUCKET/PREFIX/campaign/versions/000000000001/manifest.json"
    assert not is_allowed(policy, "s3:DeleteObject", manifest)
    assert not is_allowed(policy, "s3:PutObject", manifest)


def test_a_real_server_takes_the_settings(policy_store):
    client, bucket = policy_store.bucket._client, policy_store.bucket.name
    try:
        rules = load("s3-lifecycle.json")
        client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=rules)
        assert len(client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]) >= 1
        client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=load("s3-versioning.json"))
    finally:
        client.delete_bucket_lifecycle(Bucket=bucket)


SHAPES = {
    "s3-lifecycle.json": ("PutBucketLifecycleConfiguration", "LifecycleConfiguration"),
    "s3-encryption.json": ("PutBucketEncryption", "ServerSideEncryptionConfiguration"),
    "s3-versioning.json": ("PutBucketVersioning", "VersioningConfiguration"),
    "s3-public-access.json": ("PutPublicAccessBlock", "PublicAccessBlockConfiguration"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_settings_have_the_shape_of_amazons_own_api(name):
    """The description of the API that the client carries: names, types, allowed values."""
    import botocore.session
    from botocore.validate import ParamValidator

    operation, member = SHAPES[name]
    shape = botocore.session.get_session().get_service_model("s3").operation_model(operation).input_shape
    report = ParamValidator().validate({"Bucket": "b", member: load(name)}, shape)
    assert not report.has_errors(), report.generate_report()


def test_policies_name_actions_once_and_nothing_wide():
    for path in CLUSTER.glob("s3-policy-*.json"):
        for statement in load(path.name)["Statement"]:
            assert statement["Effect"] == "Allow"
            assert all(re.fullmatch(r"(s3|kms):[A-Za-z]+", action) for action in statement["Action"])
            assert "*" not in [statement["Resource"]]


def test_the_bucket_policy_denies_plain_http_and_a_second_manifest():
    statements = {statement["Sid"]: statement for statement in load("s3-bucket-policy.json")["Statement"]}
    assert all(statement["Effect"] == "Deny" for statement in statements.values())
    assert statements["OnlyOverTls"]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    once = statements["AManifestIsWrittenOnceEvenByAMistakenClient"]
    assert once["Condition"] == {"Null": {"s3:if-none-match": "true"}}


def test_the_fan_out_plan_says_what_the_planner_says():
    plan = yaml.safe_load((CLUSTER / "s3-fanout.yaml").read_text())
    ways = fan_outs(plan["num_bytes"], plan["num_nodes"], Network(**plan["network"]))
    assert {way.source: round(way.seconds, 1) for way in ways} == plan["seconds"]


def test_the_embedded_servers_memory_is_a_share_of_the_machines_within_bounds(monkeypatch):
    """By hand: a 32nd of 64 GiB is 2 GiB; a small machine and one of 2 TiB meet the bounds."""
    for memory, limit in ((64 << 30, 2 << 30), (4 << 30, 300 << 20), (2 << 40, 8 << 30)):
        sizes = {"SC_PHYS_PAGES": memory >> 12, "SC_PAGE_SIZE": 1 << 12}
        monkeypatch.setattr("tasks.embedded.seaweed.os.sysconf", sizes.__getitem__)
        assert memory_limit() == limit
