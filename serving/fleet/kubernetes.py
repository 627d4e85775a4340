"""The replicas behind a Kubernetes service, from its EndpointSlices; asked of the API server with the pod's own token.

Source: the EndpointSlice API (discovery.k8s.io/v1) and its paging by ``continue``.
"""

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from serving.errors import DeployError
from serving.fleet.replicas import Address

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE = 500
_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class KubernetesService:
    """The ready and starting pods of one service. Calling it returns their addresses, by name."""

    service: str
    namespace: str | None = None
    """None: the one that this pod runs in."""
    port: str | None = None
    """The port's name; None where the service has one port."""
    account: Path = ACCOUNT
    """Folder with token, ca.crt and namespace. The token is read anew each time: it expires."""

    def __call__(self) -> list[Address]:
        """Every pod once. Raises: DeployError when the API server can't be asked, or has no such service."""
        by_pod: dict[str, Address] = {}
        for found in sorted(self._slices(), key=lambda found: found.get("addressType") != "IPv4"):
            for endpoint in found.get("endpoints") or ():
                if (endpoint.get("conditions") or {}).get("terminating"):
                    continue
                address = self._address(found, endpoint)
                by_pod.setdefault(address.name, address)  # a pod with two address families is listed twice
        if not by_pod:
            raise DeployError(
                f"service {self.service} in namespace {self._namespace()}: no pods behind it; "
                "deploy.kubernetes_service names the service whose pods run vLLM"
            )
        return [by_pod[name] for name in sorted(by_pod)]

    def _address(self, found: Mapping[str, Any], endpoint: Mapping[str, Any]) -> Address:
        host = endpoint["addresses"][0]  # all of them are the same endpoint; the first is the one to use
        if ":" in host:
            host = f"[{host}]"
        url = f"http://{host}:{self._port(found)}"
        ready = (endpoint.get("conditions") or {}).get("ready")
        pod = (endpoint.get("targetRef") or {}).get("name")
        return Address(pod or url, url, ready is not False)  # no word about it is to be read as ready

    def _port(self, found: Mapping[str, Any]) -> int:
        ports = {port.get("name") or "": port["port"] for port in found.get("ports") or () if port.get("port")}
        if self.port is None and len(ports) == 1:
            return next(iter(ports.values()))
        if self.port not in ports:
            names = ", ".join(sorted(ports)) or "none"
            raise DeployError(
                f"service {self.service}: no port {self.port!r} (ports: {names}); set deploy.kubernetes_port"
            )
        return ports[self.port]

    def _slices(self) -> Iterator[dict[str, Any]]:
        more = ""
        while True:
            query = {"labelSelector": f"kubernetes.io/service-name={self.service}", "limit": str(_PAGE)}
            page = self._get(query | ({"continue": more} if more else {}))
            yield from page.get("items") or ()
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return

    def _get(self, query: Mapping[str, str]) -> dict[str, Any]:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace()}/endpointslices"
        url = f"{_api_server()}{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self._read('token')}"})
        try:
            trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trusted) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            allow = "; its role needs `list` on endpointslices in discovery.k8s.io" if error.code == 403 else ""
            raise DeployError(f"Kubernetes API: HTTP {error.code} for {path}{allow}")
        except (HTTPException, OSError, ValueError) as error:
            raise DeployError(f"Kubernetes API at {_api_server()} could not be asked ({error})")
        if not isinstance(found, dict):
            raise DeployError(f"Kubernetes API: {path} answered with no list of EndpointSlices")
        return found

    def _namespace(self) -> str:
        return self.namespace or self._read("namespace")

    def _read(self, name: str) -> str:
        try:
            return (self.account / name).read_text().strip()
        except OSError as error:
            raise DeployError(
                f"{self.account / name}: {error.strerror}; run this in a pod whose service account token is mounted"
            )


def _api_server() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise DeployError("KUBERNETES_SERVICE_HOST is not set: not in a pod; list the replicas in serving.replicas")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
