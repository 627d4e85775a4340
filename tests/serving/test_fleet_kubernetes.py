"""EndpointSlices from a real HTTPS server that answers as an API server does; no cluster."""

import datetime
import ipaddress
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from serving.errors import DeployError
from serving.fleet.kubernetes import KubernetesService
from serving.fleet.replicas import Address

PATH = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices"


def endpoint(pod, address, *, ready=True, **conditions):
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": False, **conditions},
        "nodeName": "node-a",
        "targetRef": {"kind": "Pod", "name": pod, "namespace": "inference", "uid": f"uid-{pod}"},
        "zone": "zone-a",
    }


def endpoint_slice(name, endpoints, *, family="IPv4", ports=({"name": "http", "port": 8000, "protocol": "TCP"},)):
    return {
        "addressType": family,
        "endpoints": endpoints,
        "metadata": {"name": name, "namespace": "inference", "labels": {"kubernetes.io/service-name": "vllm"}},
        "ports": list(ports),
    }


class ApiServer:
    """Pages of EndpointSlices behind TLS and a token."""

    def __init__(self, folder):
        self.pages, self.token, self.code, self.asked = [], "t0ken", 200, []
        key, cert = certificate(folder)
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                code, body = api.answer(self.path, self.headers)
                payload = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path, headers):
        query = {name: values[0] for name, values in parse_qs(urlsplit(path).query).items()}
        self.asked.append((urlsplit(path).path, query))
        if headers["authorization"] != f"Bearer {self.token}":
            return 401, {"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401}
        if self.code != 200:
            return self.code, {"kind": "Status", "status": "Failure", "code": self.code}
        page = int(query.get("continue", "0"))
        more = {"continue": str(page + 1)} if page + 1 < len(self.pages) else {}
        items = self.pages[page] if self.pages else []
        return 200, {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "1", **more}, "items": items}


def certificate(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "tls.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    (folder / "ca.crt").write_bytes(made.public_bytes(pem))
    return folder / "tls.key", folder / "ca.crt"


@pytest.fixture
def api(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("t0ken\n")
    (tmp_path / "namespace").write_text("inference")
    server = ApiServer(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server.server_port))
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_every_pod_of_all_slices_and_pages_is_a_replica_once_and_one_that_starts_is_not_ready(api, tmp_path):
    api.pages = [
        [endpoint_slice("vllm-6", [endpoint("vllm-0", "fd00::10")], family="IPv6")],
        [
            endpoint_slice("vllm-a", [endpoint("vllm-0", "10.0.0.10"), endpoint("vllm-1", "10.0.0.11", ready=False)]),
            endpoint_slice("vllm-b", [endpoint("vllm-2", "10.0.0.12", terminating=True, ready=False)]),
            endpoint_slice("vllm-c", [endpoint("vllm-3", "10.0.0.13", ready=None)]),
        ],
    ]
    assert KubernetesService("vllm", account=tmp_path)() == [
        Address("vllm-0", "http://10.0.0.10:8000"),
        Address("vllm-1", "http://10.0.0.11:8000", ready=False),
        Address("vllm-3", "http://10.0.0.13:8000"),
    ]
    selector = {"labelSelector": "kubernetes.io/service-name=vllm", "limit": "500"}
    assert api.asked == [(PATH, selector), (PATH, {**selector, "continue": "1"})]


def test_an_ipv6_address_becomes_a_url(api, tmp_path):
    api.pages = [[endpoint_slice("vllm-6", [endpoint("vllm-0", "fd00::10")], family="IPv6")]]
    assert KubernetesService("vllm", account=tmp_path)() == [Address("vllm-0", "http://[fd00::10]:8000")]


def test_of_several_ports_one_has_to_be_named(api, tmp_path):
    ports = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]
    api.pages = [[endpoint_slice("vllm-a", [endpoint("vllm-0", "10.0.0.10")], ports=ports)]]
    assert KubernetesService("vllm", port="metrics", account=tmp_path)()[0].url == "http://10.0.0.10:9000"
    with pytest.raises(DeployError, match=r"no port None \(ports: http, metrics\); set deploy.kubernetes_port"):
        KubernetesService("vllm", account=tmp_path)()


def test_a_token_that_was_renewed_is_read_anew(api, tmp_path):
    api.pages = [[endpoint_slice("vllm-a", [endpoint("vllm-0", "10.0.0.10")])]]
    service = KubernetesService("vllm", account=tmp_path)
    api.token = "renewed"
    with pytest.raises(DeployError, match="HTTP 401"):
        service()
    (tmp_path / "token").write_text("renewed")
    assert len(service()) == 1


def test_each_thing_that_is_missing_has_its_own_message(api, tmp_path, monkeypatch):
    service = KubernetesService("vllm", account=tmp_path)
    with pytest.raises(DeployError, match=r"service vllm in namespace inference: no pods behind it"):
        service()
    api.code = 403
    with pytest.raises(DeployError, match=r"HTTP 403 .*needs `list` on endpointslices"):
        service()
    with pytest.raises(DeployError, match="service account token is mounted"):
        KubernetesService("vllm", "inference", account=tmp_path / "nowhere")()
    other = tmp_path / "other"
    other.mkdir()
    certificate(other)
    (other / "token").write_text("t0ken")
    with pytest.raises(DeployError, match="certificate"):  # another authority's
        KubernetesService("vllm", "inference", account=other)()
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(DeployError, match="could not be asked"):
        service()
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    with pytest.raises(DeployError, match=r"not in a pod; list the replicas in serving\.replicas"):
        service()
