"""The Kubernetes manifests against schemas: Kubernetes' own for its kinds and for every pod of a Ray cluster, and for
KubeRay's kinds the fields that are used here, by hand out of the definitions of KubeRay 1.7 (kuberay_fields.json). With
KUBERAY_CRDS, the folder helm-chart/kuberay-operator/crds of KubeRay's repository, they are checked against them whole.
"""

import json
import os
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[2]
FOLDER = CHECKOUT / "infra" / "kubernetes"
FIELDS = json.loads(Path(__file__).with_name("kuberay_fields.json").read_text())
VERSION = "1.34"
DOCUMENTS = [
    (f"{path.name}:{body['kind']}/{body['metadata'].get('name', 'generated')}", body)
    for path in sorted(FOLDER.glob("*.yaml"))
    for body in yaml.safe_load_all(path.read_text())
]
EACH = pytest.mark.parametrize("body", [body for _, body in DOCUMENTS], ids=[name for name, _ in DOCUMENTS])


def is_of_ray(body):
    return body["apiVersion"] == "ray.io/v1"


def pod_templates(body):
    """Every pod template in a manifest, wherever it stands."""
    if isinstance(body, dict):
        if "containers" in body.get("spec", {}):
            yield body
        for value in body.values():
            yield from pod_templates(value)
    elif isinstance(body, list):
        for value in body:
            yield from pod_templates(value)


def require_valid(body):
    """Raises: what is wrong with a manifest."""
    if not is_of_ray(body):
        kubernetes_validate.validate(body, VERSION, strict=True)
        return
    schema = {"$ref": f"#/{body['kind']}", **FIELDS}
    jsonschema.Draft202012Validator(schema).validate(body["spec"])
    for template in pod_templates(body):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "of-ray"}, "template": template},
            VERSION,
            strict=True,
        )


@EACH
def test_every_manifest_fits_its_schema_and_says_nothing_that_no_schema_knows(body):
    require_valid(body)


def test_the_nightly_job_is_the_one_that_is_begun_by_hand():
    specs = {body["kind"]: body["spec"] for _, body in DOCUMENTS if is_of_ray(body)}
    assert specs["RayCronJob"]["jobTemplate"] == specs["RayJob"]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("RayJob", lambda body: body["spec"].update(entrypont="x")),
        ("RayJob", lambda body: body["spec"].update(backoffLimit="two")),
        ("RayCluster", lambda body: body["spec"]["workerGroupSpecs"][0].pop("groupName")),
        ("RayCluster", lambda body: next(pod_templates(body))["spec"]["containers"][0].update(imagePullPolicies="x")),
        ("RayCronJob", lambda body: body["spec"].pop("schedule")),
        ("CronJob", lambda body: body["spec"].update(concurrencypolicy="Forbid")),
        ("StatefulSet", lambda body: body["spec"].pop("selector")),
    ],
)
def test_a_manifest_with_a_mistake_does_not_pass(kind, change):
    body = json.loads(json.dumps(next(body for _, body in DOCUMENTS if body["kind"] == kind)))
    change(body)
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        require_valid(body)


@EACH
def test_every_manifest_fits_kuberays_whole_definition(body):
    if not is_of_ray(body):
        pytest.skip("Kubernetes' own kind")
    if not (folder := os.environ.get("KUBERAY_CRDS")):
        pytest.skip("KUBERAY_CRDS names no folder with KubeRay's custom resource definitions")
    crd = yaml.safe_load(Path(folder, f"ray.io_{body['kind'].lower()}s.yaml").read_text())
    (version,) = [one for one in crd["spec"]["versions"] if f"ray.io/{one['name']}" == body["apiVersion"]]
    jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"])).validate(body)


def closed(schema):
    """A structural schema as the API server takes it: what it does not name is a mistake."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    made = {key: closed(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {name: closed(one) for name, one in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made
